package agent

import (
	"sync"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// A ChannelOrder takes effect once it is on disk. The owner must not wait for the disk, as leases may
// end meanwhile. Each control session therefore has a worker beside the owner, which carries
// ChannelOrders out.
//
// The session reads its messages in order. It passes ChannelOrders to the worker and all other messages
// to the owner. Before the session passes on a message that creates, removes or moves a part of a
// topic, the session waits until the worker is idle. Then it waits until the owner has carried the
// message out. So earlier orders take effect before the message, and later orders after it.

// maxOrders bounds the waiting ChannelOrders. If maxOrders wait, the session stops reading, which
// pushes back on the control plane.
const maxOrders = 64

// orderQueue has the open ChannelOrders of one session. The session's goroutine calls put, wait and
// end.
type orderQueue struct {
	// Set once.
	node Node
	// applied reports that all orders up to a number are carried out, except for the faults.
	applied func(upTo uint64, faults []*srtmv1.ChannelFault)

	queue    chan *srtmv1.ChannelOrder
	open     sync.WaitGroup // orders not yet carried out
	finished chan struct{}  // closed when the worker ends
}

func startOrders(node Node, applied func(upTo uint64, faults []*srtmv1.ChannelFault)) *orderQueue {
	q := &orderQueue{node: node, applied: applied, queue: make(chan *srtmv1.ChannelOrder, maxOrders), finished: make(chan struct{})}
	go func() {
		defer close(q.finished)
		for first := range q.queue {
			batch := []*srtmv1.ChannelOrder{first}
			for n := len(q.queue); n > 0; n-- {
				batch = append(batch, <-q.queue)
			}
			q.applied(batch[len(batch)-1].Request, q.carryOut(batch))
			q.open.Add(-len(batch))
		}
	}()
	return q
}

func (q *orderQueue) put(order *srtmv1.ChannelOrder) {
	q.open.Add(1)
	q.queue <- order
}

// wait returns when all orders are carried out and answered.
func (q *orderQueue) wait() { q.open.Wait() }

// end returns when the worker has carried out all orders.
func (q *orderQueue) end() {
	close(q.queue)
	<-q.finished
}

// carryOut carries out the orders of one topic in sequence, and topics in parallel, so that one write
// to the disk serves many topics.
func (q *orderQueue) carryOut(batch []*srtmv1.ChannelOrder) (faults []*srtmv1.ChannelFault) {
	byTopic := map[string][]int{}
	for i, order := range batch {
		byTopic[order.Topic] = append(byTopic[order.Topic], i)
	}
	errs := make([]error, len(batch))
	var topics sync.WaitGroup
	for _, orders := range byTopic {
		topics.Go(func() {
			for _, i := range orders {
				errs[i] = q.node.ChangeChannels(batch[i])
			}
		})
	}
	topics.Wait()
	for i, err := range errs {
		if err != nil {
			faults = append(faults, &srtmv1.ChannelFault{Request: batch[i].Request, Error: err.Error()})
		}
	}
	return faults
}

// channelsApplied answers the orders up to upTo.
func (o *owner) channelsApplied(l *controlLink, upTo uint64, faults []*srtmv1.ChannelFault) {
	if o.control == l {
		l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_ChannelsApplied{ChannelsApplied: &srtmv1.ChannelsApplied{Request: upTo, Faults: faults}}})
	}
}
