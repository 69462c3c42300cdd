// Package handover hands clients with session affinity over between kube-proxy and the modes nft and iptables: each keeps its endpoint.
// Both have their rules in the kernel then, and the ones of the program that was there first translate connections. So the time for it is
// just before these are removed.
package handover

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
)

// limit bounds a handover: rules wait for it to be removed.
const limit = 20 * time.Second

// FromKubeProxy has the modes nft and iptables keep the clients that a kube-proxy of mode nftables or iptables keeps, in the network
// namespace of the calling thread. What has no rules there is passed over.
func FromKubeProxy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return with(func(m *kubeproxy.Memory) error {
		return errors.Join(nft.Keep(ctx, m.Clients), iptables.Keep(ctx, m.Clients))
	})
}

// ToKubeProxy is the way back. kube-proxy has one memory for all addresses of a port. A client that is at one endpoint by the Service's
// address and at another one by a node port gets the first in mode nft, and in mode iptables the one where it came last.
func ToKubeProxy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return with(func(m *kubeproxy.Memory) error {
		done := map[dataplane.Kept]bool{} // without the endpoints
		keep := func(k dataplane.Kept) error {
			of := k
			if of.Endpoint = (netip.AddrPort{}); done[of] {
				return nil
			}
			done[of] = true
			return m.Keep(k.Port, k.Protocol, k.Endpoint, k.Client)
		}
		return errors.Join(nft.Clients(ctx, keep), iptables.Clients(ctx, keep))
	})
}

func with(f func(*kubeproxy.Memory) error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	m, err := kubeproxy.OpenMemory()
	if err == nil && !m.Empty() {
		err = f(m)
	}
	if m != nil {
		err = errors.Join(err, m.Close())
	}
	if err != nil {
		return fmt.Errorf("clients of Services with session affinity may get another endpoint once: %w", err)
	}
	return nil
}
