"""Words of a record's header, of a descriptor and of a record's facts, by name: for compiled code as well.

record.py says what they mean.
"""

MAGIC_WORD, NUM_TOKENS_WORD, NUM_TURNS_WORD, TEXTS_WORD, STATS_WORD = range(5)
TICKET_ID_WORD, GROUP_ID_WORD, TASK_ID_WORD, UNROLL_INDEX_WORD, SCORE_WORD, FLAGS_WORD = range(5, 11)
HEADER_WORDS = 11

SEQUENCE, TICKET, START, NUM_WORDS, CHECKSUM = range(5)
"""Columns of a descriptor, see `messages.Descriptor`."""

# Facts of a record, a row of integers: results of the compiled checks, then its header from the second word on, then
# begin and end of the text of its episode_id, in bytes.
OUTCOME, OLDEST_VERSION, NEWEST_VERSION = range(3)
NUM_TOKENS, NUM_TURNS, TEXTS, STATS, TICKET_ID, GROUP_ID, TASK_ID, UNROLL_INDEX, SCORE, FLAGS = range(3, 13)
EPISODE_BEGIN, EPISODE_END = range(13, 15)
FACTS = 15
