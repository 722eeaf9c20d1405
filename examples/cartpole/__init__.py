"""PPO on CartPole with one learner and several actor processes, which get their weights over busync or over queues."""
