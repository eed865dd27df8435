package queue

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A message carried forward for a deleted channel does not come to a new channel of the same name, in any order of carry
// and deletion, and whether or not the process ends.
func TestWhatWasCarriedForwardEndsWithItsChannel(t *testing.T) {
	type all struct {
		*bench
		d       disk
		carried []Carried
	}
	again := func(a *all) {
		testkit.Must(t, a.top.DeleteChannel(a.now, "c", &a.fx))
		a.channel("c")
	}
	appended := func(a *all) Offset {
		var msgs []*Message
		for _, k := range a.carried {
			msgs = append(msgs, k.Message)
		}
		return a.d.append(a.top.log.End(), msgs...)
	}
	carry := func(a *all) { a.top.Disk().CarriedTo(a.now, appended(a), a.carried, true, &a.fx) }
	crash := func(a *all, snapshot []byte, channels ...string) {
		a.top, a.fx = restart(t, *a.top.log.cfg, snapshot, a.now, &a.d, channels...)
		a.top.Pause()
	}
	for name, do := range map[string]func(a *all){
		"deleted after it": func(a *all) { carry(a); again(a) },
		"finished, and deleted": func(a *all) {
			carry(a)
			a.top.EmptyChannel(a.now, a.top.Channel("c"), &a.fx)
			again(a)
		},
		"deleted meanwhile": func(a *all) {
			first := appended(a)
			again(a)
			a.top.Disk().CarriedTo(a.now, first, a.carried, true, &a.fx)
		},
		"deleted, and a crash": func(a *all) {
			carry(a)
			testkit.Must(t, a.top.DeleteChannel(a.now, "c", &a.fx))
			crash(a, a.top.cursors.Snapshot(nil, wallOf), "a")
			a.channel("c")
		},
		"deleted, and a crash before that was saved": func(a *all) {
			carry(a)
			crash(a, a.top.cursors.Snapshot(nil, wallOf), "a")
			a.channel("c")
		},
		"deleted, and a crash before any of it was saved": func(a *all) {
			snapshot := a.top.cursors.Snapshot(nil, wallOf)
			carry(a)
			crash(a, snapshot, "a")
			a.channel("c")
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := *withDisk(1, 10).log.cfg
			cfg.WriteThrough = true
			a := &all{bench: &bench{t: t, top: NewTopic(cfg)}}
			put := func(n int) {
				m := message(n, a.now)
				a.top.Disk().Appended(a.now, a.d.append(a.top.log.End(), m), &a.fx, m)
			}
			other := a.channel("a")
			a.consumer(other, 0, time.Minute, 1)
			c := a.channel("c")
			a.consumer(c, 1, time.Minute, 1)
			put(1)
			a.expect("1@0:1", "1@1:1")
			a.finish(other, 0, 1, nil)
			a.top.RemoveConsumer(a.now, other, 0, &a.fx)
			a.top.RemoveConsumer(a.now, c, 1, &a.fx)
			a.top.Pause()
			put(2)
			a.carried = a.top.cursors.Stuck(nil, 1)
			testkit.MustEqual(t, len(a.carried), 1, "to be carried forward")
			do(a)
			put(3)
			a.top.Unpause(a.now, &a.fx)
			put(4)
			read := func() {
				for a.d.read(a.top, a.now, &a.fx) > 0 {
					a.check()
				}
			}
			read() // for the topic; the channel, which has no room, reads the carried message, too
			a.consumer(a.top.Channel("c"), 2, time.Minute, 10)
			read()
			a.expect("2@2:1", "3@2:1", "4@2:1")
			if c := a.top.Channel("c"); c.Depth() != 3 || c.Counters().Lost > 0 {
				t.Errorf("depth %d, %+v", c.Depth(), c.Counters())
			}
		})
	}
}
