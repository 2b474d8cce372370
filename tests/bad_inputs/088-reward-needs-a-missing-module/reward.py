import not_installed_here  # noqa: F401


def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
