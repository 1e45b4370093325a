"""The service that decides membership and keeps runs, agents and history."""
