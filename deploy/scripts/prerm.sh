#!/bin/sh
# Before a removal; an upgrade (deb: upgrade, rpm: 1) lets the daemons run.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
	for unit in nsqd loaddistributor tbadaptor admission gateway; do
		systemctl disable --now "srtm-$unit.service"
	done
fi
