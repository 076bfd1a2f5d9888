"""What an operator sees of the server: request ids and log lines, traces, process metrics, and the names
under which other servers' dashboards look for metrics. Knows no route and no engine."""
