"""Words of a record's header, of a descriptor and of a record's facts, by name: for compiled code as well.

record.py says what they mean. A metadata field of `Trajectory` has its position by its type: a word for each integer
and float, a bit for each flag, in the order of `METADATA_FIELDS`.
"""

from impala_llm.trajectory import METADATA_FIELDS


def _of(wanted: type) -> tuple[str, ...]:
    return tuple(name for name, kind in METADATA_FIELDS.items() if kind is wanted)


INTEGERS, FLOATS, FLAG_NAMES, TEXT_NAMES = _of(int), _of(float), _of(bool), _of(str)
"""Metadata fields in the record."""
if TEXT_NAMES != ("episode_id", "env", "actor_id", "signature"):
    raise TypeError(f"a trajectory has the texts {TEXT_NAMES}: a record has four, whose lengths share a word")

MAGIC_WORD, NUM_TOKENS_WORD, NUM_TURNS_WORD, TEXTS_WORD, STATS_WORD = range(5)
WORDS = {name: word for word, name in enumerate((*INTEGERS, *FLOATS, "flags"), 5)}
TICKET_ID_WORD, UNROLL_INDEX_WORD = WORDS["ticket_id"], WORDS["unroll_index"]
SCORE_WORD, FLAGS_WORD = WORDS["score"], WORDS["flags"]
HEADER_WORDS = FLAGS_WORD + 1
BOOTSTRAP, CONTINUES = 1 << FLAG_NAMES.index("bootstrap"), 1 << FLAG_NAMES.index("continues")
ALL_FLAGS = (1 << len(FLAG_NAMES)) - 1

SEQUENCE, TICKET, START, NUM_WORDS, CHECKSUM = range(5)
"""Columns of a descriptor, see `messages.Descriptor`."""

# Facts of a record, a row of integers: results of the compiled checks, then its header from the second word on, then
# begin and end of the text of its episode_id, in bytes.
OUTCOME, OLDEST_VERSION, NEWEST_VERSION = range(3)
NUM_TOKENS, NUM_TURNS, TEXTS, STATS = range(3, 7)
FACT_INDEX = {name: NUM_TOKENS - NUM_TOKENS_WORD + word for name, word in WORDS.items()}
"""Index of each metadata field among the facts."""
TICKET_ID, GROUP_ID, TASK_ID = FACT_INDEX["ticket_id"], FACT_INDEX["group_id"], FACT_INDEX["task_id"]
UNROLL_INDEX, FLAGS = FACT_INDEX["unroll_index"], FACT_INDEX["flags"]
EPISODE_BEGIN, EPISODE_END = FLAGS + 1, FLAGS + 2
FACTS = EPISODE_END + 1
