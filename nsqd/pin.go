package main

import (
	"fmt"
	"os/user"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/kernel/hook"
)

// pin pins the arrival stamp program for an nsqd without privileges.
func (o *options) pin() error {
	uid, gid, err := owner(o.pinFor)
	if err != nil {
		return program.UsageError{Err: fmt.Errorf("--pin-arrival-stamps: %w", err)}
	}
	return hook.Pin(o.hook.PinDir, uid, gid, hook.Config{MaxConns: o.hook.MaxConns})
}

// owner returns the ids of a user. s is a name, a uid or uid:gid. For a uid the group is the user's
// own, or has the number uid if the system does not know the user.
func owner(s string) (uid, gid int, err error) {
	id, group, hasGroup := strings.Cut(s, ":")
	if u, err := strconv.ParseUint(id, 10, 31); err == nil {
		if hasGroup {
			g, err := strconv.ParseUint(group, 10, 31)
			if err != nil {
				return 0, 0, fmt.Errorf("group %q is no number", group)
			}
			return int(u), int(g), nil
		}
		if account, err := user.LookupId(id); err == nil {
			return ids(account)
		}
		return int(u), int(u), nil
	}
	account, err := user.Lookup(s)
	if err != nil {
		return 0, 0, err
	}
	return ids(account)
}

func ids(u *user.User) (uid, gid int, err error) {
	if uid, err = strconv.Atoi(u.Uid); err != nil {
		return 0, 0, fmt.Errorf("user %s: %w", u.Username, err)
	}
	if gid, err = strconv.Atoi(u.Gid); err != nil {
		return 0, 0, fmt.Errorf("group of user %s: %w", u.Username, err)
	}
	return uid, gid, nil
}
