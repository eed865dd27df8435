//go:build linux

package peer

import (
	"fmt"

	"github.com/srtm-io/srtm/tools/load"
)

// scenarios returns the scenarios in the order of docs/performance.md.
func scenarios() []load.Scenario {
	poisson := func(name string, conns int) load.Scenario {
		return load.Scenario{Name: name, What: "publishers at 10 msg/s each, at random (Poisson)", Conns: conns, Rate: 10 * float64(conns), Size: 100}
	}
	body := func(name string, size int, rate float64) load.Scenario {
		return load.Scenario{Name: name, What: "as poisson-100, larger messages", Conns: 100, Rate: rate, Size: size}
	}
	all := []load.Scenario{
		poisson("poisson-100", 100), poisson("poisson-1000", 1000), poisson("poisson-2000", 2000), poisson("poisson-4000", 4000),
		{Name: "sparse-4000", What: "4,000 publishers at 2.5 msg/s each, at random: the connections of poisson-4000 with the messages of poisson-1000", Conns: 4000, Rate: 10_000, Size: 100},
		{Name: "bursts", What: "1000 publishers, each 10 messages at once, 10,000 msg/s in all", Conns: 1000, Rate: 10_000, Together: 10, Size: 100},
		{Name: "pipelined", What: "10 publishers, one message per command, as fast as they go in", Conns: 10, Size: 100, Together: 50, Limit: 1_000_000},
		{Name: "closed", What: "10 publishers, each waits for its answer before it sends the next message", Conns: 10, Size: 100, Together: 1, Closed: true, NSQOnly: true},
		{Name: "mpub", What: "4 publishers, 200 messages per command, as fast as they go in", Conns: 4, Size: 100, Together: 200, Batch: true, Limit: 2_000_000},
		body("body-1k", 1<<10, 5000), body("body-16k", 16<<10, 2000), body("body-64k", 64<<10, 500),
		{Name: "channels-4", What: "as poisson-1000 at 5 msg/s each, 4 channels", Conns: 1000, Rate: 5000, Size: 100, Channels: 4},
		{Name: "channels-16", What: "as poisson-1000 at 2 msg/s each, 16 channels", Conns: 1000, Rate: 2000, Size: 100, Channels: 16},
		{Name: "slow", What: "as poisson-1000, and a channel that takes 100 msg/s", Conns: 1000, Rate: 10_000, Size: 100, Slow: true},
		{Name: "idle", What: "10,000 connections, 1,000 msg/s in all", Conns: 10_000, Rate: 1000, Size: 100},
		{Name: "overflow", What: "200 messages per command to disk, read when all are there", Conns: 4, Size: 100, Together: 200, Batch: true, Limit: 500_000, Late: true, Memory: 100, NSQOnly: true},
		{Name: "overflow-4", What: "as overflow, 4 channels", Conns: 4, Size: 100, Together: 200, Batch: true, Limit: 200_000, Late: true, Memory: 100, Channels: 4, NSQOnly: true},
		{Name: "fsync", What: "100 publishers, 1,000 msg/s in all, each on stable storage before it is accepted; upstream syncs each, too, but answers before it does", Conns: 100, Rate: 1000, Size: 100, Fsync: true, NSQOnly: true},
		{Name: "fsync-4", What: "as fsync, 4 channels", Conns: 100, Rate: 1000, Size: 100, Fsync: true, Channels: 4, NSQOnly: true},
		{Name: "fsync-closed", What: "100 publishers, each waits for its answer before it sends the next message, each message on stable storage before that", Conns: 100, Size: 100, Together: 1, Closed: true, Fsync: true, NSQOnly: true},
		{Name: "storm", What: "as poisson-1000, and 20,000 connections a second that come, greet and go", Conns: 1000, Rate: 10_000, Size: 100, Storm: 20_000, NSQOnly: true},
		{Name: "tls", What: "as poisson-100, encrypted", Conns: 100, Rate: 1000, Size: 100, TLS: true, NSQOnly: true},
		{Name: "tls-pipelined", What: "as pipelined, encrypted", Conns: 10, Size: 100, Together: 50, Limit: 500_000, TLS: true, NSQOnly: true},
	}
	return completed(all)
}

// stampScenarios returns the scenarios for the value and cost of arrival stamps
// (--sources). They belong to no set. See docs/arrival-stamps.md.
func stampScenarios() (all []load.Scenario) {
	for _, rate := range []int{10_000, 30_000, 50_000} {
		all = append(all, load.Scenario{
			Name: fmt.Sprintf("stamps-%d", rate), What: fmt.Sprintf("1000 publishers, %d msg/s in all, at random", rate),
			Conns: 1000, Rate: float64(rate), Size: 200, NSQOnly: true,
		})
	}
	for _, c := range []struct{ conns, rate, busy int }{{1000, 10_000, 8}, {4000, 20_000, 8}} {
		all = append(all, load.Scenario{
			Name: fmt.Sprintf("contract-%d", c.conns), Conns: c.conns, Rate: float64(c.rate), Size: 200, Burst: 50, Busy: c.busy, NSQOnly: true,
			What: fmt.Sprintf("%d publishers that keep a contract with a burst of 50, %d msg/s in all, beside %d threads that only compute", c.conns, c.rate, c.busy),
		})
	}
	return completed(all)
}

func completed(all []load.Scenario) []load.Scenario {
	for i := range all {
		all[i].Together = max(all[i].Together, 1)
		all[i].Channels = max(all[i].Channels, 1)
	}
	return all
}
