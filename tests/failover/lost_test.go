package failover

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The store is lost, and the loaddistributor starts with an empty one: publishers go on
// where they are, for brokers hold the topic and its shares.
func TestPublishersOutliveALostStore(t *testing.T) {
	const publishers, each = 4, 100
	c := newCluster(t, 1, 2, "--store=bbolt")
	spec := contract("t", 10_000, 1000, publishers)
	spec.PlacementPolicy = "loadbalance"
	c.create(spec)
	all := c.consume("t")
	cl := newClient(t, c)
	done := pace(t, cl, "t", publishers, each, 50*time.Millisecond)
	eventually(t, "they publish", func() bool { return all.count() > publishers*each/10 })
	c.kill(0)
	if err := os.Remove(filepath.Join(c.dirs[0], "loaddistributor.db")); err != nil {
		t.Fatal(err)
	}
	c.start(0)
	<-done
	finish(t, cl, all, publishers*each)
	all.once(t, publishers, each)
}
