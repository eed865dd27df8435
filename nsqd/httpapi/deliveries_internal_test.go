package httpapi

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/queue"
)

func TestDeliveriesByDistance(t *testing.T) {
	counters := queue.ChannelCounters{Delivered: 6}
	counters.ByDistance[queue.Near], counters.ByDistance[queue.Neighbour], counters.ByDistance[queue.Far] = 1, 2, 3
	for topologyAware, want := range map[bool][3]uint64{true: {1, 2, 3}, false: {0, 0, 6}} {
		var c channelJSON
		c.setDeliveries(counters, topologyAware)
		testkit.Equal(t, [3]uint64{c.ZoneLocal, c.RegionLocal, c.Global}, want, "with the experiment: %v", topologyAware)
	}
}
