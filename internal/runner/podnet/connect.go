package podnet

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// DeviceName is the name of the node's end of a Pod's network: at most 15 characters, the same after a restart.
func DeviceName(uid types.UID) string {
	sum := sha256.Sum256([]byte(uid))
	return "fl" + hex.EncodeToString(sum[:5])
}

// Endpoint is the network of one Pod.
type Endpoint struct {
	Device string // see DeviceName
	Pod    string // NAMESPACE/NAME
	PID    int    // of a process in the Pod's network namespace
	IPs    []netip.Addr
}

// Connect joins the network namespace of a Pod to the node, which from then on lets in what the Pod sends from IPs
// and drops the rest.
func (n *Network) Connect(e Endpoint) error {
	if err := n.Sources.add(e.Device, e.Pod, e.IPs); err != nil {
		return fmt.Errorf("restrict the pod to its addresses: %w", err)
	}
	return link.AddPod(link.Pod{
		Device: e.Device, Name: e.Pod, Netns: netns.Of(e.PID), Addrs: e.IPs, Gateways: n.addresses.gateways(), MTU: n.carrier.MTU(),
	})
}

// Disconnect removes the node's end of a Pod's network.
func (n *Network) Disconnect(device string) error {
	err := link.DelPod(device)
	if err == nil {
		n.Sources.remove(device)
	}
	return err
}
