"""Channel between actors and a learner rank: messages, sessions, descriptors of trajectories, acknowledgements.

Used from outside: `receiver.Receiver` at the learner, `actor_channel.ActorChannel` at an actor. They exchange
`messages`.

- at the learner: message_loop (handles each message), leader_follower (by which thread), actor_sockets, sessions (who
  is connected), offers and ingest (records on their way into the trajectory store), evaluation_tasks, no_receiver (a
  process that shares its rank with one that receives)
- at an actor: learner_connection, records_in_flight
- at both: active_clock
"""
