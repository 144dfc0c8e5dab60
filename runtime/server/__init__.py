"""An OpenAI-compatible HTTP server over one loaded model; `llama-sidecar serve` runs it, docs/SERVER.md is its guide.

Read it in this order: `requests` (what a client may ask), `pool` (who answers, and when), `answers` (what goes back), `app` (the
routes), `serve` (sockets, signals, the end). It needs Starlette and uvicorn, the extra `server`; importing this package does not.
"""
