#!/bin/sh
# After a removal or purge. Data stays, and with it the user who owns it: messages are
# not a package's to delete.
set -e
if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
if [ "$1" = purge ]; then
	cd "${DPKG_ROOT:-}/var/lib/srtm" 2>/dev/null || exit 0
	rmdir nsqd loaddistributor tbadaptor admission 2>/dev/null || true
	if [ -n "$(ls -A .)" ]; then
		echo "srtm: /var/lib/srtm has data and stays: delete it yourself" >&2
	else
		cd / && rmdir "${DPKG_ROOT:-}/var/lib/srtm"
	fi
fi
