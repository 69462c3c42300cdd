package relay

import (
	"context"
	"io"
	"net"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/hubble"
)

// agents are nodes with fairlead's agents, which the API server leads to.
type agents struct{ client kubernetes.Interface }

// Ask is part of Nodes.
func (a agents) Ask(ctx context.Context, node, method string, request []byte) (io.ReadCloser, error) {
	answer, err := a.client.CoreV1().RESTClient().Post().Resource("nodes").Name(node).SubResource("proxy").
		Suffix(strings.Trim(hubble.Path, "/"), method).SetHeader("Content-Type", "application/octet-stream").Body(request).Stream(ctx)
	switch {
	case apierrors.IsNotFound(err):
		return nil, status.Errorf(codes.Unavailable, "node %s records no flows: start its agent with --hubble-listen-address", node)
	case err != nil:
		return nil, status.Errorf(codes.Unavailable, "node %s does not answer: %v", node, err)
	}
	return answer, nil
}

// Address is part of Nodes: that of the node's agent.
func (agents) Address(n *corev1.Node) string {
	port := n.Status.DaemonEndpoints.KubeletEndpoint.Port
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP && port != 0 {
			return net.JoinHostPort(a.Address, strconv.Itoa(int(port)))
		}
	}
	return ""
}
