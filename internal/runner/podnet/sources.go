package podnet

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/loop"
)

// Sources keeps Pods from sending with other addresses than their own. Pods run where the kernel cannot do that, but a
// condition of the Node is False then. Its methods are safe for concurrent use.
type Sources struct {
	node   string
	events *events.Recorder
	log    *slog.Logger
	// changed wakes run, report is called after unsupported has changed.
	changed loop.Signal
	report  func()

	mu     sync.Mutex
	kernel *link.Sources // nil before the first use, and after run
	closed bool
	pods   map[string]sourcesOf // by device
	retry  nftables.Retry
	// err is why the last write failed. Where the kernel cannot have it, unsupported has the same error.
	err         error
	unsupported *nftables.UnsupportedError
	reported    map[string]uint64 // packets by device, of which the log has been told
}

type sourcesOf struct {
	pod   string // NAMESPACE/NAME
	addrs []netip.Addr
}

func newSources(o Options) *Sources {
	return &Sources{
		node: o.NodeName, events: o.Events, log: o.Log, changed: loop.NewSignal(), report: o.Changed,
		pods: map[string]sourcesOf{}, reported: map[string]uint64{},
	}
}

// adopt takes in a Pod of an earlier run, without a write.
func (s *Sources) adopt(device, pod string, addrs []netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[device] = sourcesOf{pod, addrs}
	if s.kernel != nil {
		s.kernel.Adopt(device, addrs)
		s.changed.Set()
	}
}

// add takes in a Pod before its device is made. After an error the Pod must not be connected.
func (s *Sources) add(device, pod string, addrs []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[device] = sourcesOf{pod, addrs}
	if s.closed || s.unsupported != nil && s.retry.Waits(time.Now()) {
		if s.kernel != nil {
			s.kernel.Adopt(device, addrs)
		}
		return nil
	}
	if err := s.open(); err != nil {
		return s.outcome(err)
	}
	return s.outcome(s.kernel.Add(device, addrs))
}

// remove takes in that the device of a Pod is gone.
func (s *Sources) remove(device string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, device)
	delete(s.reported, device)
	if s.kernel == nil || s.closed {
		return
	}
	if err := s.kernel.Remove(device); err != nil {
		_ = s.outcome(err)
		s.changed.Set()
	}
}

// open connects to the kernel. The caller holds mu.
func (s *Sources) open() (err error) {
	if s.kernel != nil {
		return nil
	}
	if s.kernel, err = link.NewSources(s.changed.Set); err != nil {
		s.kernel = nil
		return err
	}
	for device, p := range s.pods {
		s.kernel.Adopt(device, p.addrs)
	}
	return nil
}

// outcome records how a write ended, and returns its error unless the kernel cannot have it. The caller holds mu.
func (s *Sources) outcome(err error) error {
	var unsupported *nftables.UnsupportedError
	errors.As(err, &unsupported)
	was, failed := s.unsupported, s.err
	s.unsupported, s.err = unsupported, err
	if unsupported != nil {
		s.retry.Lacked(time.Now())
		err = nil
	} else {
		s.retry = nftables.Retry{}
	}
	switch {
	case unsupported != nil && was == nil:
		s.log.Warn(notChecked+"; run 'fairlead check' for details", "err", unsupported)
		s.events.Event(nodeRef(s.node), corev1.EventTypeWarning, reasonNotChecked, notChecked+": "+unsupported.Error())
	case unsupported == nil && was != nil && err == nil:
		s.log.Info("the kernel now checks the source addresses of pods")
	}
	if (failed == nil) != (s.err == nil) {
		s.report()
	}
	return err
}

// run keeps the kernel in line until ctx ends: it puts back what another program has removed, and logs which Pods send
// with addresses that are not theirs.
func (s *Sources) run(ctx context.Context) {
	defer s.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		looked := false
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		case <-timer.C:
			looked = true
		}
		again := s.repair()
		if looked {
			s.logForged()
		}
		timer.Reset(again)
		select { // of many changes by others, one in this time is followed
		case <-ctx.Done():
			return
		case <-time.After(settleInterval):
		}
	}
}

// repair writes the tables again where they differ, and returns when to look again.
func (s *Sources) repair() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unsupported != nil && s.retry.Waits(time.Now()) {
		return resyncInterval
	}
	err := s.open()
	repaired := false
	if err == nil {
		repaired, err = s.kernel.Repair()
	}
	if repaired && err == nil {
		s.log.Debug("wrote the rules for the source addresses of pods", "pods", len(s.pods))
	}
	if s.outcome(err) != nil {
		s.log.Error("cannot check the source addresses of pods; retrying", "err", err, "after", retryInterval)
		return retryInterval
	}
	return resyncInterval
}

// Forged returns the Pods whose packets were dropped within the last day since their source was no address of the Pod,
// by NAMESPACE/NAME, with the number of these packets.
func (s *Sources) Forged() (map[string]uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts, err := s.counts()
	out := map[string]uint64{}
	for device, n := range counts {
		out[s.pods[device].pod] += n
	}
	return out, err
}

// counts are the dropped packets by device, of Pods that there are. The caller holds mu.
func (s *Sources) counts() (map[string]uint64, error) {
	if s.kernel == nil || s.closed {
		return nil, nil
	}
	counts, err := s.kernel.Forged()
	maps.DeleteFunc(counts, func(device string, n uint64) bool { return s.pods[device].pod == "" || n == 0 })
	return counts, err
}

// logForged reports Pods whose packets were dropped since the last look.
func (s *Sources) logForged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts, err := s.counts()
	if err != nil {
		s.log.Error("cannot read how many packets of pods were dropped", "err", err)
		return
	}
	for device, n := range counts {
		if n > s.reported[device] {
			s.log.Warn("a pod sends with source addresses that are not its own; its packets are dropped",
				"pod", s.pods[device].pod, "packets", n-s.reported[device], "device", device)
		}
	}
	s.reported = counts
}

// close ends the use of the kernel; the tables stay.
func (s *Sources) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.kernel != nil {
		_ = s.kernel.Close()
	}
}

// Condition returns the Node condition PodsSourcesChecked.
func (s *Sources) Condition() corev1.NodeCondition {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := corev1.NodeCondition{Type: PodsSourcesChecked, Status: corev1.ConditionTrue, Reason: "Checked",
		Message: "what pods send from other addresses than their own is dropped"}
	if s.err != nil {
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonNotChecked, notChecked+": "+s.err.Error()
	}
	return c
}
