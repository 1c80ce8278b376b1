"""Channel between actors and a learner rank: messages, sessions, descriptors of trajectories, acknowledgements."""
