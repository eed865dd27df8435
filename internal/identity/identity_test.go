package identity_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
)

func process(name, lock string, at mono.Time) identity.Process {
	return identity.Process{
		Stamp: mono.Stamp{Process: name, At: at},
		Place: identity.Place{Address: name + ":4150", Host: "host-" + name, Folder: "/data/" + name, Lock: lock},
	}
}

// A second process gets the id only after the first process has provably ended, or after its lease is
// over.
func TestIDBelongsToOneProcess(t *testing.T) {
	const yes, replaced, used, lost = "", "replaced", "in use", "lost"
	for name, c := range map[string]struct {
		p     identity.Process
		lives bool
		ended string
		want  string
	}{
		"a later hello of the owner":                    {p: process("b", "L2", 30), lives: true, want: yes},
		"an overtaken hello of the owner":               {p: process("b", "L2", 10), lives: true, want: replaced},
		"another process while the owner lives":         {p: process("c", "L3", 99), lives: true, want: used},
		"another process without a lock":                {p: process("c", "", 99), lives: true, want: used},
		"another process after the owner's lease":       {p: process("c", "L3", 99), want: yes},
		"another process after the owner's end":         {p: process("c", "L3", 99), lives: true, ended: "b", want: yes},
		"another process after some other one's end":    {p: process("c", "L3", 99), lives: true, ended: "a", want: used},
		"a process that has the owner's lock":           {p: process("c", "L2", 99), lives: true, want: yes},
		"a hello that the owner's first one overtook":   {p: process("c", "L2", 10), lives: true, want: lost},
		"an overtaken hello of the lock, lease over":    {p: process("c", "L2", 10), want: lost},
		"the process before, while the owner lives":     {p: process("a", "L1", 99), lives: true, want: lost},
		"the process before, after the owner's lease":   {p: process("a", "L1", 99), want: lost},
		"the process before, after the owner has ended": {p: process("a", "L1", 99), ended: "b", want: lost},
	} {
		t.Run(name, func(t *testing.T) {
			var o identity.Owner
			for _, p := range []identity.Process{process("a", "L1", 5), process("b", "L2", 20)} {
				if err := o.Check("id", p, false, 0); err != nil {
					t.Fatalf("%s: %v", p.Stamp.Process, err)
				}
				o.Take(p)
			}
			o.End(c.ended)
			err := o.Check("id", c.p, c.lives, time.Second)
			got := yes
			switch {
			case errors.As(err, new(*identity.InUse)):
				got = used
			case errors.As(err, new(*identity.Lost)):
				got = lost
			case errors.Is(err, identity.ErrReplaced):
				got = replaced
			}
			if got != c.want {
				t.Errorf("%v, want %q", err, c.want)
			}
			if got == used || got == lost {
				for _, part := range []string{`"id"`, "b:4150", "host-b", "/data/b", c.p.Place.Address, c.p.Place.Folder} {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("%q does not name %s", err, part)
					}
				}
			}
		})
	}
}

// The number of remembered instances is bounded, and the newest are kept.
func TestRememberedInstancesAreBounded(t *testing.T) {
	var o identity.Owner
	names := strings.Split("a b c d e f g h i j k", " ")
	for _, name := range names {
		o.Take(process(name, "", 1))
	}
	for i, name := range names[:len(names)-1] {
		err := o.Check("id", process(name, "", 2), false, 0)
		if remembered := i >= len(names)-9; remembered != errors.As(err, new(*identity.Lost)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
