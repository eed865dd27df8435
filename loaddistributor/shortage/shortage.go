// Package shortage computes how many brokers a cluster lacks. The SRTM paper spawns brokers
// when no broker has room (section 4.2). The loaddistributor starts no machines; it reports
// the number to an operator or to an autoscaler. The package is pure, and time is an
// argument.
package shortage

import (
	"fmt"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

const (
	// Remembered is how long a refused topic counts. Within this time the caller may repeat
	// the request. A caller without patience does not hold a broker forever.
	Remembered = 10 * time.Minute
	// Held is how long a number must differ from the announced number before the number is
	// announced. A broker needs less time for a restart, and to connect to a new leader.
	Held = 15 * time.Second
	// maxRefused limits the refused topics. Further topics do not count; the number of
	// brokers is large by then.
	maxRefused = 1000
	// Most is the largest number of brokers that is reported at once.
	Most = 1000
)

// Cluster is the cluster as placement sees it.
type Cluster struct {
	Brokers []placement.Broker // connected and not draining
	// Allocated is the rate of the topics on all brokers, msg/s. Brokers that drain or are
	// disconnected count, because their publishers need room elsewhere.
	Allocated int64
	// Unfitted counts the topics that are on all brokers and miss their SLO there.
	Unfitted int
}

// Need is how many brokers the cluster lacks, and why.
type Need struct {
	Brokers   int   // lacking
	Present   int   // brokers that take topics
	Capacity  int64 // of these brokers, msg/s
	Allocated int64 // see Cluster
	Refused   int   // topics that were refused for want of capacity
	// RefusedRate is the rate that the refused topics lack, msg/s.
	RefusedRate int64
	Unfitted    int // see Cluster
}

// Reason explains the number to people.
func (n Need) Reason() string {
	var reasons []string
	if n.Refused > 0 {
		reasons = append(reasons, fmt.Sprintf("topics refused for want of capacity: %d (%d msg/s)", n.Refused, n.RefusedRate))
	}
	if n.Unfitted > 0 {
		reasons = append(reasons, fmt.Sprintf("topics that miss their SLO on all brokers: %d", n.Unfitted))
	}
	return strings.Join(append(reasons, fmt.Sprintf("%d of %d msg/s are allocated", n.Allocated, n.Capacity)), "; ")
}

// refusal is a demand that placement has refused.
type refusal struct {
	rate    int64 // msg/s that the topic has requested
	has     int64 // msg/s that the topic has; 0 for a new topic
	brokers int64 // minimum number of brokers that the topic needs; 0: not known
	time    time.Time
}

// Book keeps the refused topics, and the number of brokers that was announced. Make it with
// New. The caller guards it.
type Book struct {
	// threshold is the part of the capacity that topics may use. Above it a broker is
	// lacking.
	threshold float64
	refused   map[string]refusal // by topic
	announced int                // -1: nothing yet
	differs   time.Time          // start of the difference from announced; zero: none
}

// New returns an empty book. Requires: 0 < threshold <= 1.
func New(threshold float64) *Book {
	return &Book{threshold: threshold, refused: map[string]refusal{}, announced: -1}
}

// Refuse records that placement could not give a topic the given rate, in msg/s. has is the
// topic's present rate. A refusal does not count if another broker would not help. It does
// not count either if the topic keeps its rate on other brokers: Cluster has such topics.
func (b *Book) Refuse(topic string, rate, has int64, infeasible *placement.Infeasible, now time.Time) {
	if !infeasible.Capacity() {
		return
	}
	r := refusal{rate: rate, has: has, time: now}
	if infeasible.Bound == "brokers" {
		r.brokers = infeasible.Need
	} else if rate <= has {
		return
	}
	if _, known := b.refused[topic]; known || len(b.refused) < maxRefused {
		b.refused[topic] = r
	}
}

// Placed records that a topic has rate msg/s. An earlier refusal to give the topic no more
// than rate ends.
func (b *Book) Placed(topic string, rate int64) {
	if b.refused[topic].rate <= rate {
		delete(b.refused, topic)
	}
}

// Need returns how many brokers the cluster lacks at now. A further broker counts with the
// mean capacity of the present brokers.
func (b *Book) Need(c Cluster, now time.Time) Need {
	n := Need{Present: len(c.Brokers), Allocated: c.Allocated, Unfitted: c.Unfitted}
	var free, usable int64
	for _, broker := range c.Brokers {
		n.Capacity += broker.Mcap
		if unused := broker.Mcap - broker.Allocated; unused > 0 {
			free, usable = free+unused, usable+1
		}
	}
	lacking := int64(0)
	// order: sums and a maximum
	for topic, r := range b.refused {
		if now.Sub(r.time) > Remembered {
			delete(b.refused, topic)
			continue
		}
		n.Refused++
		n.RefusedRate += max(0, r.rate-r.has)
		lacking = max(lacking, r.brokers-usable)
	}
	if c.Unfitted > 0 {
		lacking = max(lacking, 1)
	}
	// Room can be missing although the sum fits: an overloaded broker has a negative room.
	lack := max(float64(n.Allocated+n.RefusedRate)/b.threshold-float64(n.Capacity), float64(n.RefusedRate-free))
	if lack > 0 {
		further := int64(1)
		if n.Capacity > 0 {
			mean := float64(n.Capacity) / float64(n.Present)
			further = int64(min(lack/mean, Most))
			if float64(further)*mean < lack {
				further++
			}
		}
		lacking = max(lacking, further)
	}
	n.Brokers = int(min(lacking, Most))
	return n
}

// Announce reports whether n is to be announced at now. The number must have differed from
// the announced number for Held. The first number of a book is announced after Held, also
// 0, because an earlier leader may have announced another number.
func (b *Book) Announce(n Need, now time.Time) bool {
	switch {
	case n.Brokers == b.announced:
		b.differs = time.Time{}
	case b.differs.IsZero():
		b.differs = now
	case now.Sub(b.differs) >= Held:
		b.announced, b.differs = n.Brokers, time.Time{}
		return true
	}
	return false
}

// Announced returns the announced number of brokers; 0: none was announced.
func (b *Book) Announced() int { return max(0, b.announced) }
