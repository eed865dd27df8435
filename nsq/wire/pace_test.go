package wire

import (
	"fmt"
	"testing"
)

func paceLimits() Limits {
	lim := testLimits()
	lim.Pace = true
	return lim
}

func TestPace(t *testing.T) {
	for _, c := range []struct {
		in     string
		weight uint8 // 0: refused
	}{
		{"PACE 1 1\n", 1}, {"PACE 1 255\r\n", 255}, {"PACE 1 7 more\n", 7}, {string(AppendPace(nil, 10)), 10},
		{"PACE 1 0\n", 0}, {"PACE 1 256\n", 0}, {"PACE 1 -1\n", 0}, {"PACE 1 x\n", 0}, {"PACE 1 \n", 0},
		{"PACE 1\n", 0}, {"PACE\n", 0}, {"PACE 2 1\n", 0}, {"PACE  1 1\n", 0}, {"PACE 01 1\n", 0},
	} {
		cmd, n, _, err := ParseCommand([]byte(c.in+"NOP\n"), paceLimits())
		if c.weight == 0 {
			if err == nil {
				t.Errorf("%q is %+v", c.in, cmd)
			}
			continue
		}
		if err != nil || n != len(c.in) || cmd.Verb != VerbPace || cmd.Ready != int(c.weight) {
			t.Errorf("%q is %+v, %d bytes, %v", c.in, cmd, n, err)
		}
		// If PACE is not allowed, PACE is an unknown command.
		if _, _, _, err := ParseCommand([]byte(c.in), testLimits()); err == nil || err.Error() != `E_INVALID unknown command "PACE"` {
			t.Errorf("%q where it is not allowed: %v", c.in, err)
		}
	}
}

func FuzzPace(f *testing.F) {
	for _, in := range []string{"PACE 1 1\n", "PACE 1 255\n", "PACE 2 1\n", "PACE 1 256\r\n", "PACE 1", "PACE\n"} {
		f.Add([]byte(in))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > fuzzCap {
			return
		}
		checkPrefixes(t, in, paceLimits())
		cmd, n, _, err := ParseCommand(in, paceLimits())
		was, wasN, _, wasErr := ParseCommand(in, testLimits())
		if cmd.Verb != VerbPace {
			if pace := err != nil && wasErr != nil; !pace && (n != wasN || fmt.Sprint(err) != fmt.Sprint(wasErr) || commandDiff(cmd, was) != "") {
				t.Fatalf("%q: %v, %v; without PACE %v, %v", in, cmd, err, was, wasErr)
			}
			return
		}
		again, _, _, err := ParseCommand(AppendPace(nil, uint8(cmd.Ready)), paceLimits())
		if err != nil || again.Ready != cmd.Ready || cmd.Ready == 0 {
			t.Fatalf("%q is of weight %d, and then of %d, %v", in, cmd.Ready, again.Ready, err)
		}
	})
}
