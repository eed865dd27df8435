package emulate

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/fleet"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/subscriber"
)

// Background is an additional load on named brokers: a topic without a contract, with a
// consumer.
type Background struct {
	// At lists the publishers per broker; empty: no background.
	At []BackgroundAt
	// Topic differs from the run's topic.
	Topic string
	// Spec describes the messages of each publisher. The number of publishers is the sum
	// over At. The seed is the complement of the run's seed.
	Spec schedule.Spec
}

// BackgroundAt is the background of one broker.
type BackgroundAt struct {
	Address    string // host:port, unique
	Publishers int
}

// DefaultBackground is the background of the paper: Poisson publishers of 10 msg/s that
// send batches of 10.
func DefaultBackground() Background {
	return Background{
		Topic: "background",
		Spec:  schedule.Spec{Rate: 10, Batch: 10, Process: schedule.Poisson, Size: 100},
	}
}

// ParseBackground parses texts of the form "host:port=publishers".
func ParseBackground(texts []string) ([]BackgroundAt, error) {
	var entries []BackgroundAt
	for _, text := range texts {
		address, number, found := strings.Cut(text, "=")
		publishers, err := strconv.Atoi(number)
		if !found || err != nil {
			return nil, fmt.Errorf("background %q: want host:port=publishers", text)
		}
		entries = append(entries, BackgroundAt{service.WithPort(address, service.NSQPort), publishers})
	}
	return entries, nil
}

func (b *Background) publishers() (n int) {
	for _, entry := range b.At {
		n += entry.Publishers
	}
	return n
}

// spec returns the spec of the whole background in a run with the given seed.
func (b *Background) spec(seed uint64) schedule.Spec {
	s := b.Spec
	s.Seed, s.Publishers = ^seed, b.publishers()
	return s
}

// validate returns every fault, joined. topic is the run's topic.
func (b *Background) validate(topic string) error {
	if len(b.At) == 0 {
		return nil
	}
	var f faults.List
	f.If(!wire.ValidTopicName(b.Topic) || b.Topic == topic, "background topic: %q is no valid name other than the run's own", b.Topic)
	seen := map[string]bool{}
	for _, entry := range b.At {
		_, _, err := net.SplitHostPort(entry.Address)
		f.If(err != nil || seen[entry.Address], "background %q: want host:port, each once", entry.Address)
		f.If(entry.Publishers < 1, "background %s: %d publishers, want at least 1", entry.Address, entry.Publishers)
		seen[entry.Address] = true
	}
	if len(f) == 0 {
		err := b.spec(0).Validate()
		f.If(err != nil, "background: %w", err)
	}
	return f.Err()
}

// newBackground returns the background traffic of cfg, with messages marked by id.
func newBackground(cfg *Config, id uint32) (*traffic, error) {
	spec := cfg.Background.spec(cfg.Load.Spec.Seed)
	sources := spec.Sources()
	var assigned []fleet.Assignment
	var addresses []string
	for _, entry := range cfg.Background.At {
		addresses = append(addresses, entry.Address)
		for range entry.Publishers {
			n := int32(len(assigned))
			sources[n].ID = fmt.Sprintf("background.%d", n)
			assigned = append(assigned, fleet.Assignment{Source: n, Address: entry.Address, Epoch: 1})
		}
	}
	t, err := cfg.traffic(fleet.Config{Topic: cfg.Background.Topic, Run: id, Sources: sources},
		func() schedule.Stream { return spec.Stream() }, &subscriber.Config{Channel: "iotpub", Nsqd: addresses})
	if err != nil {
		return nil, err
	}
	t.name, t.brokers = "background", func() int { return len(addresses) }
	t.fleet.Assign(assigned)
	return t, nil
}
