def score(solution_str):
    return 1.0
