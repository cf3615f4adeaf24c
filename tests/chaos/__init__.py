"""Random faults on a real local service under streaming load: python -m tests.chaos"""
