#!/bin/sh
# After an installation or an upgrade, of deb (configure) and rpm (1, 2). DPKG_ROOT is
# where dpkg installs without chroot; all of it may be repeated.
set -e
root="${DPKG_ROOT:-}"

if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers --root="$root/" srtm.conf
elif ! grep -q '^srtm:' "$root/etc/passwd"; then
	useradd --prefix "$root/" --system --user-group --no-create-home --home-dir /var/lib/srtm --shell /usr/sbin/nologin srtm
fi
if command -v systemd-tmpfiles >/dev/null; then
	systemd-tmpfiles --root="$root/" --create srtm.conf
fi

# Nothing is enabled or started: which daemons belong here, and their configuration, are
# the operator's to say. Those that run get the new program.
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart 'srtm-*.service'
fi
