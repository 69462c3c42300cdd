package runner

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// masqueraded writes the masquerading of this node's pods. Where the kernel cannot, pods reach each
// other and Services all the same: that is no error, but in the condition PodsMasqueraded.
func (n *network) masqueraded(pods []netip.Prefix) (err error) {
	if n.masquerade == nil {
		n.masquerade, err = link.NewMasquerade(func() {
			n.mu.Lock()
			n.flushed = true
			n.mu.Unlock()
			n.tamper()
		})
		if err != nil {
			return err
		}
	}
	err = n.masquerade.Set(pods, append(slices.Clone(n.r.o.ClusterCIDRs), pods...))
	var lacking *nftables.UnsupportedError
	if errors.As(err, &lacking) {
		n.masqueradeRetry.Lacked(time.Now())
		err = nil
	} else {
		n.masqueradeRetry = nftables.Retry{}
	}
	n.mu.Lock()
	was := n.unmasqueraded
	n.unmasqueraded = lacking
	n.mu.Unlock()
	switch {
	case lacking != nil && was == nil:
		n.r.o.Log.Warn(unmasqueradedMeans+"; 'fairlead check' says more", "err", lacking)
		n.r.rec.Event(nodeRef(n.r.o.NodeName), corev1.EventTypeWarning, reasonNotMasqueraded, unmasqueradedMeans+": "+lacking.Error())
	case lacking == nil && was != nil && err == nil:
		n.r.o.Log.Info("the kernel masquerades what pods send out of the cluster now")
	}
	return err
}

// masqueradeDue reports whether what the kernel lacked is to be tried again.
func (n *network) masqueradeDue() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.unmasqueraded != nil && !n.masqueradeRetry.Waits(time.Now())
}

// PodsMasqueraded is the Node condition that is True while what pods send out of the cluster gets the
// node's address.
const PodsMasqueraded corev1.NodeConditionType = "fairlead.dev/PodsMasqueraded"

const (
	reasonNotMasqueraded = "NotMasqueraded"
	unmasqueradedMeans   = "what pods of this node send out of the cluster keeps their addresses, so it gets no answers " +
		"unless routers outside know the pods' ranges"
)

// masqueradeCondition returns the Node condition PodsMasqueraded.
func (n *network) masqueradeCondition() corev1.NodeCondition {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := corev1.NodeCondition{Type: PodsMasqueraded, Status: corev1.ConditionTrue, Reason: "Masqueraded",
		Message: "what pods send out of the cluster has the node's address"}
	switch {
	case n.unmasqueraded != nil:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonNotMasqueraded, unmasqueradedMeans+": "+n.unmasqueraded.Error()
	case !n.applied:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Starting", "waiting for the Nodes"
	}
	return c
}
