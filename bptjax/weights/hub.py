"""Uploads exports to the Hugging Face hub."""

from pathlib import Path


class NotUploaded(RuntimeError):
    """The hub did not take an export, which stays on disk."""


def check_hub_name(name: str) -> None:
    """Checks the name of a repository on the hub.

    Raises:
      ValueError: the name is not NAME or OWNER/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"--push_to_hub={name}: must be OWNER/NAME ({reason})") from error


def push(directory: Path, name: str) -> str:
    """Uploads a directory to the repository `name`, a private one unless it exists. Returns its
    address.

    Raises:
      NotUploaded: one line with the reason and the command that uploads.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(name, private=True, exist_ok=True)
        message = "Upload an export of bptjax"
        api.upload_folder(repo_id=repo.repo_id, folder_path=directory, commit_message=message)
    except Exception as error:  # Of the hub, of its HTTP library, or of the network.
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise NotUploaded(
            f"--push_to_hub={name}: {directory} is complete, but not uploaded ({reason}); when "
            f"`hf auth login` has succeeded, run `hf upload {name} {directory}`"
        ) from error
    return str(repo)
