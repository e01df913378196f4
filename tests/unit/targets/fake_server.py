"""A stand-in for `benchctl serve`: answers what a launch asks for. Flags choose how it misbehaves."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    exec_ns = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json({})
        elif self.path == "/version":
            self._json({"version": "9.9", "mode": "eager", "attention_backend": "TORCH_SDPA", "num_blocks": 7})
        elif self.path == "/v1/models":
            self._json({"data": [{"id": "fake", "max_model_len": 4096}]})
        elif self.path == "/v1/startup":
            now = time.monotonic_ns()
            when = {"process": "worker-0", "start_ns": self.exec_ns, "end_ns": now}
            spans = [
                {**when, "name": "attention-backend", "attributes": {"backend": "TORCH_SDPA", "passed_over": []}},
                {**when, "name": "kv-cache", "attributes": {"blocks": 7}},
                {**when, "name": "weights"},
            ]
            self._json({"exec_ns": self.exec_ns, "healthy_ns": now, "unaccounted_ns": 5_000_000, "spans": spans})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--say", default="")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", action="store_true", help="start a child and print its process id")
    arguments = parser.parse_args()
    if arguments.say:
        print(arguments.say, flush=True)
    if arguments.exit is not None:
        sys.exit(arguments.exit)
    if arguments.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    Handler.exec_ns = time.monotonic_ns()
    server = HTTPServer(("127.0.0.1", arguments.port), Handler)
    if arguments.ready_file and not arguments.never_ready:
        temporary = arguments.ready_file + ".tmp"
        with open(temporary, "w") as file:
            port = server.server_address[1]
            json.dump({"url": f"http://127.0.0.1:{port}", "port": port, "pid": os.getpid()}, file)
        os.rename(temporary, arguments.ready_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
