"""A process that joins a running training, and evaluates one version at length while newer ones are published."""
