package conn

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A loop that ends just after handing on a commit wakes its committer once for both events.
func TestTheCommitterEndsAfterItsLastCommit(t *testing.T) {
	p := testkit.Result(rawfd.NewPoller()).Must(t)
	k := committer{poller: p}
	defer k.close()
	k.busy.Store(new(commit))
	p.Wake()
	k.stop()
	p.Wait(true)
	over := make(chan struct{})
	go func() {
		defer close(over)
		k.run()
	}()
	select {
	case <-over:
	case <-time.After(testkit.Hang):
		k.stop()
		<-over
		t.Error("it waits, and stop was called")
	}
}
