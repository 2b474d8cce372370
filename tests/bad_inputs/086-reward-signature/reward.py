def score(prompt, answer):
    return 1.0
