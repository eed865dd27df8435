package agent

import (
	"sync"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// A ChannelOrder takes effect once the disk has it. The owner must not wait for the disk: leases
// end meanwhile. So each control session has a worker beside the owner that carries ChannelOrders
// out.
//
// The session reads its messages in order, and hands ChannelOrders to the worker and everything
// else to the owner. Before it hands over a message that creates, removes or moves something of
// a topic, it waits until the worker is idle, and after that until the owner has carried the
// message out. So the orders before the message are carried out before it, and those after the
// message after it.

// maxOrders bounds the ChannelOrders that wait. Beyond it the session reads no further, which
// pushes back on the control plane.
const maxOrders = 64

// orderQueue has the ChannelOrders of one session that are not carried out. The session's
// goroutine puts, waits and ends.
type orderQueue struct {
	// Set once.
	node Node
	// applied says that all orders up to a number are carried out, but for the faults.
	applied func(upTo uint64, faults []*srtmv1.ChannelFault)

	queue chan *srtmv1.ChannelOrder
	open  sync.WaitGroup // orders that are not carried out
	over  chan struct{}  // closed when the worker has ended
}

func startOrders(node Node, applied func(upTo uint64, faults []*srtmv1.ChannelFault)) *orderQueue {
	q := &orderQueue{node: node, applied: applied, queue: make(chan *srtmv1.ChannelOrder, maxOrders), over: make(chan struct{})}
	go func() {
		defer close(q.over)
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

// end returns when the worker has carried out what was put.
func (q *orderQueue) end() {
	close(q.queue)
	<-q.over
}

// carryOut carries out the orders of a topic one after the other, and topics beside each other:
// one write of the disk serves many topics.
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

// changesTopic reports whether a message is about what ChannelOrders change.
func changesTopic(m *srtmv1.ControllerMessage) bool {
	switch m.Message.(type) {
	case *srtmv1.ControllerMessage_Prepare, *srtmv1.ControllerMessage_Remove, *srtmv1.ControllerMessage_Seek, *srtmv1.ControllerMessage_TakeOver:
		return true
	}
	return false
}

// channelsApplied answers orders.
func (o *owner) channelsApplied(l *controlLink, upTo uint64, faults []*srtmv1.ChannelFault) {
	if o.control == l {
		l.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_ChannelsApplied{ChannelsApplied: &srtmv1.ChannelsApplied{Request: upTo, Faults: faults}}})
	}
}
