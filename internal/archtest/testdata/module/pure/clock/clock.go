// Package clock reads clocks in ways that a search for calls would miss.
package clock

import (
	"time"
	when "time"
)

type source struct{ now func() time.Time }

// Now hands a clock on.
func Now() (time.Duration, source) {
	s := source{now: time.Now}           // want "time.Now"
	later := when.Since                  // want "time.Since"
	t := time.NewTimer(0)                // want "time.NewTimer"
	t.Reset(later(s.now()))              // a method of what is banned already
	time.AfterFunc(0, func() { use(t) }) // want "time.AfterFunc"
	return 2 * time.Second, s
}

func use(*time.Timer) {}
