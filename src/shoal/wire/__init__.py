"""What travels between members, agents, clients and the coordinator."""
