"""Who holds each sentence of SECURITY.md: the promise, and the tests that prove it."""

from __future__ import annotations

API = "tests/api/test_inputs.py::"
RAY = "tests/runtime/test_ray_token.py::"
TOKEN = RAY + "test_a_cluster_of_a_run_has_a_token_that_is_nowhere_to_be_read"
LISTENERS = "tests/e2e/test_hsdp.py::test_copies_train_as_one_model_and_send_it_once"
VLLM = (
    "tests/vllm/test_signals.py::test_vllm_listens_on_loopback_and_a_signal_to_every_process_saves"
)
SGLANG = (
    "tests/sglang/test_start.py::"
    "test_an_engine_has_its_files_in_the_folder_of_the_run_and_listens_on_loopback"
)
MEETING = "tests/runtime/test_meeting.py::"
INTERFACE = MEETING + "test_the_environment_names_the_interface_of_the_address"
STORE = MEETING + "test_the_store_is_reached_at_the_address_in_use_alone"
SERVE = "tests/report/test_serve.py::"
ENDPOINT = "tests/agents/test_endpoint.py::"
REMOTE = "tests/agents/test_remote.py::"
STATE = "tests/train/test_state_reader.py::"
TEMPLATES = "tests/data/test_hostile_templates.py::"
CANARY = "tests/e2e/test_secrets.py::"
CONFIG = "tests/config/test_secrets.py::"
JUDGE = "tests/rewards/test_judge.py::"
MODE = "tests/run/test_permissions.py::"
OWNED = "tests/persist/test_ownership.py::"
SANDBOX = "tests/run/test_reward_sandbox.py::"
TOOLS = "tests/tools/test_sandbox.py::"
TRACKERS = "tests/observe/test_trackers.py::"
NOT_SHOWN = CONFIG + "test_a_secret_is_refused_and_not_shown"
PROGRAM = "tests/agents/test_command.py::test_a_program_gets_its_episode_and_nothing_of_the_users"

PROMISES: dict[str, tuple[str, ...]] = {
    "On one machine, every port of a run listens on loopback alone.": (LISTENERS, VLLM),
    "`millrace serve` listens on 127.0.0.1 alone.": (SERVE + "test_it_listens_on_loopback_alone",),
    "It answers GET and HEAD with the token of its address and a Host header of loopback, and 403"
    " otherwise.": (
        SERVE + "test_without_the_token_there_is_nothing",
        SERVE + "test_a_page_of_another_name_is_refused",
        SERVE + "test_nothing_can_be_written",
    ),
    "It serves one report and no files.": (SERVE + "test_no_path_leads_to_a_file",),
    "The endpoint of agents listens on `agents.host`, 127.0.0.1 by default.": (
        ENDPOINT + "test_nobody_outside_this_machine_reaches_the_endpoint",
    ),
    "A warning names any other address.": (ENDPOINT + "test_another_host_is_named_in_a_warning",),
    "Each episode has a random key that dies with it.": (
        "tests/agents/test_service.py::test_a_key_opens_its_own_episode_and_dies_with_it",
        "tests/agents/test_service.py::test_no_request_is_served_without_a_key",
        ENDPOINT + "test_ten_attacks_fail_with_the_documented_code",
    ),
    "Workers need the run's token, from `RUN/agents.json`.": (
        REMOTE + "test_no_token_opens_anything_but_its_own",
    ),
    "A Ray cluster that millrace starts has a new random token.": (
        RAY + "test_each_cluster_has_another_token",
    ),
    "A client without it cannot join.": (TOKEN,),
    "millrace writes the token to no file, and no worker has it in its own environment variables.": (
        TOKEN,
    ),
    "The log of a run says if a node asks for no token.": (
        "tests/runtime/test_ray.py::test_colocated_sides_share_gpus_one_to_one",
    ),
    "Messages between processes are typed msgpack, and so are the CUDA handles in a store.": (
        "tests/test_no_pickle.py::test_no_file_runs_what_it_reads",
        "tests/runtime/test_rpc.py::test_a_reply_of_another_type_fails_its_call_and_no_other",
        "tests/sync/test_ipc.py::test_what_the_store_says_of_slots_is_read_and_never_run",
    ),
    "millrace unpickles nothing but train states.": (
        "tests/test_no_pickle.py::test_no_file_runs_what_it_reads",
    ),
    "Their unpickler admits the classes of a state alone, so a state cannot run code.": (
        STATE + "test_an_index_that_runs_code_is_refused_before_it_runs",
        STATE + "test_a_value_that_runs_code_is_refused_before_it_runs",
    ),
    "Its index cannot name files outside of its folder.": (
        STATE + "test_an_index_names_files_of_its_own_folder_alone",
    ),
    "A function that a Python program gives to millrace is imported by its path, or runs in that"
    " program.": (
        API + "test_a_function_of_a_module_has_a_path_and_a_closure_has_none",
        API + "test_it_is_refused_by_name_and_leaves_no_folder",
    ),
    "None is sent or pickled.": (
        "tests/api/test_stories.py::test_a_dataset_in_memory_and_a_function_of_the_script",
        "tests/test_no_pickle.py::test_no_file_runs_what_it_reads",
    ),
    "Every file of a checkpoint is proven against the SHA-256 of its manifest before it is loaded.": (
        "tests/pipeline/test_checkpoint.py::"
        "test_a_damaged_checkpoint_is_passed_over_with_a_reason_that_names_the_file",
    ),
    "A damaged record of the journal is named, and never used.": (
        "tests/pipeline/test_journal.py::"
        "test_a_flipped_byte_in_the_middle_names_the_file_and_the_offset",
        "tests/pipeline/test_journal.py::"
        "test_what_is_written_is_read_and_a_cut_or_a_flip_never_adds_to_it",
    ),
    "The chat template of a model folder runs in Jinja's immutable sandbox.": (
        TEMPLATES + "test_an_attack_on_objects_or_files_is_refused",
    ),
    "It reaches no object of Python and no file.": (
        TEMPLATES + "test_an_attack_on_objects_or_files_is_refused",
        TEMPLATES + "test_the_name_of_an_object_is_empty_text",
    ),
    "`model.trust_remote_code` is off by default.": (
        "tests/models/test_remote_code.py::test_it_is_off_unless_the_user_sets_it",
    ),
    "While it is off, no code of a model folder runs.": (
        "tests/models/test_remote_code.py::test_the_code_of_a_folder_runs_only_if_it_is_trusted",
    ),
    "Text from users and models is never parsed as control tokens or as terminal markup.": (
        "tests/data/test_tokenizer.py::test_special_tokens_in_a_string_are_text",
        "tests/agents/test_render.py::test_no_text_of_others_becomes_a_control_token",
        "tests/cli/test_main.py::test_what_models_and_folders_are_called_is_no_markup",
        "tests/report/test_watch_view.py::test_texts_of_the_folder_do_not_control_the_terminal",
        "tests/report/test_query.py::test_control_characters_of_a_model_do_not_reach_the_terminal",
    ),
    "A secret is an environment variable whose name ends in KEY, TOKEN, SECRET, PASSWORD or"
    " CREDENTIALS, and whose value has eight characters or more.": (
        CONFIG + "test_a_variable_is_a_secret_by_its_name_and_length",
    ),
    "No file of a run has the value of a secret, and no line that millrace prints has one.": (
        CANARY + "test_no_file_of_a_run_and_no_line_that_it_prints_has_a_secret",
    ),
    "Errors, and what reward functions print, show `***` in its place.": (
        CONFIG + "test_the_texts_of_errors_have_no_secret",
        CANARY + "test_no_file_of_a_run_and_no_line_that_it_prints_has_a_secret",
    ),
    "A configuration with a secret is refused: the value of one, a key with the name of one, or an"
    " address with a password.": (
        NOT_SHOWN,
        CONFIG + "test_a_reference_to_the_environment_is_refused",
    ),
    "The API key of a judge comes from the environment alone.": (
        NOT_SHOWN,
        JUDGE + "test_a_hosted_judge_needs_a_key",
    ),
    "Its errors do not show the key.": (
        JUDGE + "test_a_judge_without_a_score_is_a_failure_with_a_reason",
        JUDGE + "test_a_key_that_no_header_can_have_is_refused_and_not_shown",
    ),
    "Warnings about a tracker leave out the password of a URL.": (
        "tests/observe/test_trackers.py::test_a_password_is_never_cut_open",
    ),
    "Programs of agents get none of your variables, but for a few such as PATH and those that"
    " `agents.env` names.": (PROGRAM,),
    "Sockets, tokens and a judge's scores are your user's alone, whatever your umask is.": (
        MODE + "test_only_the_user_reaches_the_sockets_of_a_run",
        MODE + "test_only_the_user_reads_the_token_for_workers",
        MODE + "test_only_the_user_reads_the_scores_of_a_judge",
        VLLM,
    ),
    "All other files of a run follow your umask.": (
        CANARY + "test_a_run_makes_no_file_that_the_users_umask_forbids",
    ),
    "millrace writes only into folders that it made: a marker, `.millrace-run`, names them.": (
        OWNED + "test_a_users_folder_is_refused_untouched",
        OWNED + "test_an_evaluations_folder_is_ours",
    ),
    "It refuses any other folder that is not empty, and deletes nothing there.": (
        OWNED + "test_a_users_folder_is_refused_untouched",
        OWNED + "test_a_users_folder_is_refused_for_a_checkpoint_too",
        OWNED + "test_an_export_never_writes_over_anything",
    ),
    "It follows no link when it writes.": (
        OWNED + "test_links_are_not_written_through",
        OWNED + "test_a_checkpoint_that_lies_elsewhere_is_unlinked_not_deleted",
    ),
    "A reward function runs in a process of its own with a deadline.": (
        "tests/rewards/test_pool.py::"
        "test_a_call_past_its_deadline_is_killed_and_the_others_are_answered",
    ),
    "With `reward.sandbox=true` it has no network, no files and variables of yours, and a new"
    " process for each call.": (
        SANDBOX + "test_a_function_reaches_its_own_folder_and_nothing_else",
        SANDBOX + "test_no_response_changes_the_score_of_another",
    ),
    "Code of the policy runs in such a sandbox too.": (
        TOOLS + "test_nothing_of_the_driver_is_visible",
        TOOLS + "test_an_attack_fails_and_names_its_error",
        TOOLS + "test_a_bomb_ends_at_the_limit_that_is_named",
    ),
    "A machine that cannot isolate it is refused.": (
        SANDBOX + "test_a_machine_without_isolation_is_refused",
        "tests/agents/test_run_agents.py::test_a_machine_without_isolation_is_refused",
    ),
}
"""Each sentence under "Promises", without its line breaks."""

ROWS: dict[str, tuple[str, ...]] = {
    "the driver and its workers": (LISTENERS,),
    "millrace's stores": (LISTENERS, STORE),
    "gloo": (LISTENERS, INTERFACE),
    "NCCL": (INTERFACE,),
    "vLLM, SGLang: the meeting of their workers": (VLLM, SGLANG),
    "vLLM, SGLang: calls and replies": (VLLM, SGLANG),
    "wandb's own processes": (TRACKERS + "test_wandb_has_every_row_and_the_version_as_its_axis",),
    "answers to `millrace why`": (MODE + "test_only_the_user_reaches_the_sockets_of_a_run",),
    "`trainer.logger=[prometheus]`": (
        TRACKERS + "test_prometheus_scrapes_the_newest_row_and_the_newest_validation",
    ),
    "MLflow, Trackio": (
        TRACKERS + "test_mlflow_continues_its_run",
        TRACKERS + "test_trackio_continues_its_run_and_prints_nothing",
    ),
    "`agents.command`, `agents.remote`": (
        ENDPOINT + "test_nobody_outside_this_machine_reaches_the_endpoint",
    ),
    "`millrace serve`": (SERVE + "test_it_listens_on_loopback_alone",),
    "Ray's daemons, drivers and workers": (TOKEN,),
}
"""Each row of the table "What listens where", by its first cell."""
