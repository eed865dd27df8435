package faults

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A killed broker is found dead by its ports, and the broker's publishers and share go to other
// brokers at once. After a restart, the broker has nothing from disk. A broker killed long after the
// loss of the control plane continues with its base.
func TestDeathIsNoticedByEvidence(t *testing.T) {
	c := newCluster(t, false, shortLeases, "available", "available", "available", "available")
	create, cancel := context.WithTimeout(t.Context(), local.Patience)
	defer cancel()
	c.create(create)
	_, stop := c.load(offered/4, offered/4, offered/4, offered/4)
	testkit.WaitFor(c.t, "brokers have their shares", func() bool { return whole(c.shares(), 3) })
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.grpc))
	placed := func() (on map[string]bool) {
		r := testkit.Result(admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: topic})).Must(t)
		on = map[string]bool{}
		for _, q := range r.Topic.Quotas {
			on[q.BrokerId] = true
		}
		return on
	}
	dead := c.brokers[0]
	if !placed()[dead.name] {
		t.Fatalf("the topic is on %v", placed())
	}
	wait(2 * time.Second) // the ports have been probed, and the lease renewed
	c.must(dead.process.Kill())
	began := time.Now()
	testkit.WaitFor(c.t, "its publishers are elsewhere", func() bool { return !placed()[dead.name] })
	moved := time.Since(began)
	testkit.WaitFor(c.t, "others hold what it held", func() bool {
		var sum int64
		for _, m := range c.shares().Members {
			if m.BrokerId != dead.name {
				sum += m.GetAcknowledged().GetRateMilli()
			}
		}
		return sum >= rate*980
	})
	t.Logf("publishers had another broker after %v, its share was others' after %v", moved, time.Since(began))

	// The broker starts while the control plane is down: no process can permit the use of the base.
	c.must(c.control.Kill())
	c.startBroker(dead)
	testkit.WaitFor(c.t, "its base is not on the disk any more", func() bool {
		files, err := filepath.Glob(filepath.Join(dead.dir, "shares", "*.json"))
		s, gone := dead.state()
		return err == nil && gone == nil && len(files) == 0 && held(s).RateMilli == 0
	})
	// Another broker notes that it is alone, and is killed then.
	alone := c.brokers[1]
	testkit.WaitFor(c.t, "it notes that it is alone", func() bool {
		_, err := os.Stat(filepath.Join(alone.dir, "shares", "alone"))
		return err == nil
	})
	c.must(alone.process.Kill())
	c.startBroker(alone)
	testkit.WaitFor(c.t, "the broker uses its base", func() bool {
		s, err := alone.state()
		return err == nil && held(s).RateMilli > 0
	})
	c.flows(rate / 3)
	c.startControl()
	testkit.WaitFor(c.t, "all of the contract is held again", func() bool {
		s := c.shares()
		var sum int64
		for _, m := range s.Members {
			sum += m.GetAcknowledged().GetRateMilli()
		}
		return s.Contract != nil && sum == rate*1000
	})
	c.flows(rate)
	c.verify(stop(), fixed())
}
