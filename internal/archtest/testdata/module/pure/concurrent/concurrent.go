// Package concurrent has goroutines and channels.
package concurrent

type box struct {
	c chan int // want "channel type"
}

func (b box) use(f func()) {
	go f()          // want "go statement"
	b.c <- 1        // want "channel send"
	_ = <-b.c       // want "channel receive"
	for range b.c { // want "range over a channel"
	}
	select { // want "select statement"
	default:
	}
}
