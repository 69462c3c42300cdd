package kubeproxy

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// nodeRetry is how long FindNode waits before it asks again.
const nodeRetry = time.Second

// nodesPage is how many Nodes are listed at once.
const nodesPage = 500

// NodeName returns the name of this machine's Node. A name that was given counts as it is. The machine's own name is
// looked for in the API: where no Node has it, the Node with an address of this machine is taken. It asks until the API
// server answers.
func (k *Flags) NodeName(ctx context.Context, log *slog.Logger, client kubernetes.Interface, name string) (string, error) {
	if k.changed("node-name") {
		return name, nil
	}
	for waiting := false; ; waiting = true {
		found, err := findNode(ctx, client, name, machineAddresses())
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case err == nil && found == "":
			log.Warn("the API has no Node of this machine's name, and none with one of its addresses: waiting for the first; "+
				"or give the name with --hostname-override", "node", name)
			return name, nil
		case err == nil:
			if found != name {
				log.Warn("the API has no Node of this machine's name; using the Node that has an address of this machine, "+
					"name it with --hostname-override", "name", name, "node", found)
			}
			return found, nil
		case apierrors.IsForbidden(err):
			log.Warn("cannot look for this machine's Node; using this machine's name", "node", name, "err", err)
			return name, nil
		case !waiting:
			log.Warn("cannot look for this machine's Node; trying again", "node", name, "err", err, "period", nodeRetry)
		}
		select {
		case <-ctx.Done():
		case <-time.After(nodeRetry):
		}
	}
}

// findNode returns name if a Node has it, else the name of the only Node with one of the addresses, else "".
func findNode(ctx context.Context, client kubernetes.Interface, name string, own []netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	_, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		return name, nil
	}
	if !apierrors.IsNotFound(err) {
		return "", err
	}
	var found []string
	for o := (metav1.ListOptions{Limit: nodesPage}); ; {
		list, err := client.CoreV1().Nodes().List(ctx, o)
		if err != nil {
			return "", err
		}
		for i := range list.Items {
			if hasAddress(&list.Items[i], own) {
				found = append(found, list.Items[i].Name)
			}
		}
		if o.Continue = list.Continue; o.Continue == "" {
			break
		}
	}
	if len(found) != 1 {
		return "", nil
	}
	return found[0], nil
}

// hasAddress reports whether a Node has one of the addresses as its InternalIP or ExternalIP.
func hasAddress(n *corev1.Node, own []netip.Addr) bool {
	return slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool {
		ip, err := netip.ParseAddr(strings.TrimSpace(a.Address))
		return err == nil && (a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP) && slices.Contains(own, ip.Unmap())
	})
}

// machineAddresses returns the addresses of this machine at which others may reach it.
func machineAddresses() (out []netip.Addr) {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p.Addr().Unmap())
		}
	}
	return out
}
