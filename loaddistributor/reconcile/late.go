package reconcile

import (
	"maps"
	"slices"
	"time"
)

// Late means that publishers move to new brokers although channels have no consumers there yet.
type Late struct {
	Missing map[string][]string // by channel: the new brokers without consumers
}

// lateFor is how long nudges follow a move. A broker ends no connection of a consumer that was connected
// recently (nsqd --nudge-consumers-after, 20 s), for example because an earlier move ended its
// previous connection. Such a consumer would look up the topic at its own interval only, by default
// after up to a minute.
const lateFor = 30 * time.Second

// Latecomers nudges the late consumers of a topic after a move, until they have come. The pause doubles
// after each nudge, because a nudge interrupts a busy consumer for up to a second.
type Latecomers struct {
	missing    map[string][]string // see Late
	pause      time.Duration
	due, until time.Time
}

// NewLatecomers returns the latecomers of a move. previous are the latecomers of an earlier move; nil:
// none. pause is the time until the first nudge.
func NewLatecomers(previous *Latecomers, late Late, pause time.Duration, now time.Time) *Latecomers {
	l := &Latecomers{maps.Clone(late.Missing), pause, now.Add(pause), now.Add(lateFor)}
	if previous != nil {
		// order: each channel is merged alone
		for channel, brokers := range previous.missing {
			l.missing[channel] = slices.Compact(slices.Sorted(slices.Values(slices.Concat(l.missing[channel], brokers))))
		}
	}
	return l
}

// Step returns the nudges that are due, and whether no nudge will follow. planned are the brokers of the
// topic's plan, retiring the brokers that the topic leaves, and read is Consumers.Read.
func (l *Latecomers) Step(planned, retiring []string, read map[string][]string, now time.Time) (nudges []Nudge, over bool) {
	missing := map[string][]string{}
	// order: each channel is filtered alone
	for channel, brokers := range l.missing {
		left := slices.DeleteFunc(slices.Clone(brokers), func(id string) bool {
			return !slices.Contains(planned, id) || slices.Contains(read[id], channel)
		})
		if len(left) > 0 {
			missing[channel] = left
		}
	}
	if l.missing = missing; len(missing) == 0 {
		return nil, true
	}
	if !now.Before(l.due) {
		nudges = nudgesFor(slices.Sorted(maps.Keys(missing)), slices.Concat(retiring, planned), read)
		l.pause *= 2
		l.due = now.Add(l.pause)
	}
	return nudges, l.due.After(l.until)
}

// nudgesFor returns one nudge for each channel, at the first of the brokers with consumers of the
// channel. Most consumers are connected to all brokers, so one broker per channel suffices.
func nudgesFor(channels, brokers []string, read map[string][]string) (nudges []Nudge) {
	channelsOf := map[string][]string{}
	for _, channel := range channels {
		if i := slices.IndexFunc(brokers, func(id string) bool { return slices.Contains(read[id], channel) }); i >= 0 {
			channelsOf[brokers[i]] = append(channelsOf[brokers[i]], channel)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(channelsOf)) {
		nudges = append(nudges, Nudge{id, channelsOf[id]})
	}
	return nudges
}
