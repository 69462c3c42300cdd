package podnet

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/loop"
)

// masquerade gives packets that Pods send out of the cluster the node's address. Where the kernel cannot, Pods reach
// each other and Services: that is not an error, but a condition of the Node.
type masquerade struct {
	node     string
	cluster  []netip.Prefix
	events   *events.Recorder
	log      *slog.Logger
	tampered loop.Signal

	// The goroutine of Network.Run owns these.
	kernel  *link.Masquerade
	written []netip.Prefix
	retry   nftables.Retry

	mu      sync.Mutex
	flushed bool // another program has removed the rules
	// unsupported is why the kernel cannot masquerade, nil where it can.
	unsupported *nftables.UnsupportedError
}

func newMasquerade(o Options, tampered loop.Signal) *masquerade {
	return &masquerade{node: o.NodeName, cluster: o.ClusterCIDRs, events: o.Events, log: o.Log, tampered: tampered}
}

// forget does nothing: nf_tables reports each change of the rules.
func (*masquerade) forget() {}

func (m *masquerade) close() error {
	if m.kernel == nil {
		return nil
	}
	return m.kernel.Close()
}

// pending reports whether write has something to do.
func (m *masquerade) pending(p *plan) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	due := m.unsupported != nil && !m.retry.Waits(time.Now())
	return m.flushed || due || len(m.written) == 0 || !slices.Equal(m.written, p.own.cidrs)
}

func (m *masquerade) write(p *plan) (err error) {
	if !m.pending(p) {
		return nil
	}
	m.mu.Lock()
	m.flushed = false
	m.mu.Unlock()
	m.written = nil
	if m.kernel == nil {
		if m.kernel, err = link.NewMasquerade(m.flush); err != nil {
			return err
		}
	}
	err = m.kernel.Set(p.own.cidrs, append(slices.Clone(m.cluster), p.own.cidrs...))
	var unsupported *nftables.UnsupportedError
	if errors.As(err, &unsupported) {
		m.retry.Lacked(time.Now())
		err = nil
	} else {
		m.retry = nftables.Retry{}
	}
	m.report(unsupported, err)
	if err == nil {
		m.written = p.own.cidrs
	}
	return err
}

// flush takes in that another program has removed the rules.
func (m *masquerade) flush() {
	m.mu.Lock()
	m.flushed = true
	m.mu.Unlock()
	m.tampered.Set()
}

// report records whether the kernel can masquerade, and reports a change of that.
func (m *masquerade) report(unsupported *nftables.UnsupportedError, err error) {
	m.mu.Lock()
	was := m.unsupported
	m.unsupported = unsupported
	m.mu.Unlock()
	switch {
	case unsupported != nil && was == nil:
		m.log.Warn(notMasqueraded+"; run 'fairlead check' for details", "err", unsupported)
		m.events.Event(nodeRef(m.node), corev1.EventTypeWarning, reasonNotMasqueraded, notMasqueraded+": "+unsupported.Error())
	case unsupported == nil && was != nil && err == nil:
		m.log.Info("the kernel now masquerades packets that pods send out of the cluster")
	}
}

func (m *masquerade) unsupportedNow() *nftables.UnsupportedError {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unsupported
}
