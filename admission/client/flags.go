package client

import (
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/faults"
)

// Flags adds the flags of a program that uses an admission server if an address is set. purpose is part
// of the help.
func (c *Config) Flags(fs *flag.FlagSet, purpose string) {
	fs.Func("admission-address", "UDP `host:port` of an admission server "+purpose+"; repeat it for several (default none: no limit)", func(s string) error {
		c.Servers = append(c.Servers, s)
		return nil
	})
	fs.Func("admission-mac-key-file", "`file` of keys as that server's --mac-key-file", func(path string) (err error) {
		c.Keys, err = ReadKeys(path)
		return err
	})
	fs.Func("admission-default-reply", "`reply` where no such server answers: deny or admit (default deny)", func(s string) (err error) {
		c.DefaultAdmit, err = ParseReply(s)
		return err
	})
	fs.Func("admission-wait", "for how `long` a decision waits for a server that looks the key up in its store, 1ms to 5s (default 500ms); an answer that comes later is not charged", func(s string) (err error) {
		if c.Wait, err = time.ParseDuration(s); err == nil {
			err = checkWait(c.Wait)
		}
		return err
	})
}

func checkWait(wait time.Duration) error {
	if wait < time.Millisecond || wait > MaxWait {
		return fmt.Errorf("a decision that waits %v: want 1ms to %v", wait, MaxWait)
	}
	return nil
}

// Run closes the client when ctx ends.
func (c *Client) Run(ctx context.Context) error {
	<-ctx.Done()
	c.Close()
	return nil
}

// ParseReply reports whether a reply admits.
func ParseReply(reply string) (admit bool, err error) {
	if reply != "admit" && reply != "deny" {
		return false, fmt.Errorf("%q: want deny or admit", reply)
	}
	return reply == "admit", nil
}

// ReadKeys reads lines with a number and a secret in hex; "#" begins a comment.
func ReadKeys(path string) ([]wire.Key, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var keys []wire.Key
	var f faults.List
	for i, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			f.If(true, "%s, line %d: want a number and a secret in hex", path, i+1)
			continue
		}
		id, err := strconv.ParseUint(fields[0], 10, 16)
		f.If(err != nil, "%s, line %d: the number is not 0 to 65535", path, i+1)
		secret, err := hex.DecodeString(fields[1])
		f.If(err != nil, "%s, line %d: the secret is not hex", path, i+1)
		keys = append(keys, wire.Key{ID: uint16(id), Secret: secret})
	}
	f.If(len(keys) == 0 && len(f) == 0, "%s has no key", path)
	if err := f.Err(); err != nil {
		return nil, err
	}
	_, err = wire.NewSealer(keys)
	return keys, err
}
