// Package relay answers Hubble's API for all nodes of a cluster: it asks each node's agent, and adds what the agents do not know of
// the Pods of other nodes.
package relay

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/hubble/api/peer"
	pb "github.com/fairlead/fairlead/internal/hubble/api/relay"
)

const (
	// unaryTimeout bounds what one node takes to answer about itself, flowsTimeout what all take to answer with their flows.
	unaryTimeout = 5 * time.Second
	flowsTimeout = 30 * time.Second
	// atOnce is how many nodes are asked at a time.
	atOnce = 32
	// maxQuestions bounds the questions for flows that are answered at a time: each asks all nodes. At most maxFollows of them follow,
	// so that they leave places for short ones. As many questions for other things have their own places.
	maxQuestions = 16
	maxFollows   = maxQuestions / 2
)

// flowsMethod is the method whose answer has flows.
const flowsMethod = "GetFlows"

// Relay answers for all nodes.
type Relay struct {
	observer.UnimplementedObserverServer
	peer.UnimplementedPeerServer

	client  kubernetes.Interface
	nodes   Nodes
	release string
	log     *slog.Logger

	questions, follows, others *hubble.Places
	// kept bounds the memory of all questions: the bytes that are kept now.
	kept  atomic.Int64
	retry time.Duration // retryPeriod, unless a test wants another
	peers time.Duration // peersPeriod, unless a test wants another
	again time.Duration // nodesPeriod, unless a test wants another
}

// Nodes are how a Relay reaches the nodes of its cluster.
type Nodes interface {
	// Ask calls a method of a node, and returns its answer as hubble.Handler writes it. Its errors are statuses.
	Ask(ctx context.Context, node, method string, request []byte) (io.ReadCloser, error)
	// Address is where a node is asked, empty for none.
	Address(node *corev1.Node) string
}

// New returns a Relay that asks the agents of nodes with the rights of cfg, which may use nodes/proxy, list nodes and read Pods. The
// caller decides who may ask the Relay.
func New(cfg *rest.Config, release string, log *slog.Logger) (*Relay, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // one question asks every node; atOnce bounds them
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	return Over(agents{client}, client, release, log), nil
}

// Over returns a Relay that asks by nodes. Its client may list nodes and read Pods. The caller decides who may ask the Relay.
func Over(nodes Nodes, client kubernetes.Interface, release string, log *slog.Logger) *Relay {
	return &Relay{
		client: client, nodes: nodes, release: release, log: log, retry: retryPeriod, peers: peersPeriod, again: nodesPeriod,
		questions: hubble.NewPlaces(maxQuestions, "questions for flows are being answered"),
		follows:   hubble.NewPlaces(maxFollows, "clients follow the flows"),
		others:    hubble.NewPlaces(maxQuestions, "questions for nodes and namespaces are being answered"),
	}
}

// list reads all nodes.
func (r *Relay) list(ctx context.Context) ([]corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	list, err := r.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "cannot list the nodes: %v", err)
	}
	return list.Items, nil
}

// names are the names of all nodes, sorted.
func (r *Relay) names(ctx context.Context) ([]string, error) {
	list, err := r.list(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(list))
	for i := range list {
		out = append(out, list[i].Name)
	}
	slices.Sort(out)
	return out, nil
}

// ask calls a method of a node, and f with each message of its answer. Its errors are statuses.
func (r *Relay) ask(ctx context.Context, node, method string, request proto.Message, f func([]byte) error) error {
	body, err := proto.Marshal(request)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	answer, err := r.nodes.Ask(ctx, node, method, body)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Close() }()
	limit := hubble.MaxAnswer
	if method == flowsMethod {
		limit = hubble.MaxFlow
	}
	return hubble.ReadAnswer(answer, limit, f)
}

// reply is the answer of one node about itself.
type reply[M proto.Message] struct {
	node    string
	message M
	err     error
}

// askAll calls a method that has one message as its answer on all nodes.
func askAll[M proto.Message](ctx context.Context, r *Relay, method string, request proto.Message, empty func() M) ([]reply[M], error) {
	done, err := r.others.Take()
	if err != nil {
		return nil, err
	}
	defer done()
	nodes, err := r.names(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	out := make([]reply[M], len(nodes))
	each(nodes, func(i int, node string) {
		out[i] = reply[M]{node: node, message: empty()}
		out[i].err = r.ask(ctx, node, method, request, func(text []byte) error { return proto.Unmarshal(text, out[i].message) })
	})
	return out, nil
}

// each calls f for all nodes, for atOnce of them at a time.
func each(nodes []string, f func(i int, node string)) {
	var wg sync.WaitGroup
	places := make(chan struct{}, atOnce)
	for i, node := range nodes {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			f(i, node)
		})
	}
	wg.Wait()
}

func (r *Relay) statuses(ctx context.Context) ([]reply[*observer.ServerStatusResponse], error) {
	return askAll(ctx, r, "ServerStatus", &observer.ServerStatusRequest{},
		func() *observer.ServerStatusResponse { return &observer.ServerStatusResponse{} })
}

// GetNodes is part of observer.ObserverServer.
func (r *Relay) GetNodes(ctx context.Context, _ *observer.GetNodesRequest) (*observer.GetNodesResponse, error) {
	all, err := r.statuses(ctx)
	if err != nil {
		return nil, err
	}
	out := &observer.GetNodesResponse{}
	for _, s := range all {
		n := &observer.Node{Name: s.node, State: pb.NodeState_NODE_CONNECTED, Tls: &observer.TLS{Enabled: true, ServerName: s.node}}
		if m := s.message; s.err != nil {
			n.State = pb.NodeState_NODE_UNAVAILABLE
		} else {
			n.Version, n.UptimeNs, n.NumFlows = m.GetVersion(), m.GetUptimeNs(), m.GetNumFlows()
			n.MaxFlows, n.SeenFlows = m.GetMaxFlows(), m.GetSeenFlows()
		}
		out.Nodes = append(out.Nodes, n)
	}
	return out, nil
}

// ServerStatus is part of observer.ObserverServer: it adds up the answers of the nodes.
func (r *Relay) ServerStatus(ctx context.Context, _ *observer.ServerStatusRequest) (*observer.ServerStatusResponse, error) {
	all, err := r.statuses(ctx)
	if err != nil {
		return nil, err
	}
	out := &observer.ServerStatusResponse{Version: r.release}
	for _, s := range all {
		if m := s.message; s.err != nil {
			out.UnavailableNodes = append(out.UnavailableNodes, s.node)
		} else {
			out.NumFlows += m.GetNumFlows()
			out.MaxFlows += m.GetMaxFlows()
			out.SeenFlows += m.GetSeenFlows()
			out.FlowsRate += m.GetFlowsRate()
			out.UptimeNs = max(out.GetUptimeNs(), m.GetUptimeNs())
		}
	}
	out.NumUnavailableNodes = wrapperspb.UInt32(uint32(len(out.GetUnavailableNodes())))
	out.NumConnectedNodes = wrapperspb.UInt32(uint32(len(all) - len(out.GetUnavailableNodes())))
	return out, nil
}

// GetNamespaces is part of observer.ObserverServer.
func (r *Relay) GetNamespaces(ctx context.Context, q *observer.GetNamespacesRequest) (*observer.GetNamespacesResponse, error) {
	all, err := askAll(ctx, r, "GetNamespaces", q, func() *observer.GetNamespacesResponse { return &observer.GetNamespacesResponse{} })
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, a := range all {
		for _, n := range a.message.GetNamespaces() {
			seen[n.GetNamespace()] = true
		}
	}
	return hubble.Namespaces(seen), nil
}

// errTooMany is the error of a question whose answer is too large.
func errTooMany() error {
	return status.Errorf(codes.ResourceExhausted,
		"the nodes have more than %d such flows, or %d MiB; ask for fewer by --last, --since or a filter", maxFlows, maxBytes>>20)
}

// unavailable is the answer for a node without flows.
func unavailable(node string, err error) *observer.GetFlowsResponse {
	return &observer.GetFlowsResponse{NodeName: node, ResponseTypes: &observer.GetFlowsResponse_NodeStatus{NodeStatus: &pb.NodeStatusEvent{
		StateChange: pb.NodeState_NODE_UNAVAILABLE, NodeNames: []string{node}, Message: status.Convert(err).Message(),
	}}}
}

// NewHandler answers gRPC for a Relay. It ends all streams when stop is closed.
func NewHandler(r *Relay, stop <-chan struct{}) http.Handler {
	return hubble.NewServer(r, grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo,
		h grpc.StreamHandler,
	) error {
		ctx, cancel := context.WithCancel(s.Context())
		defer cancel()
		go func() {
			select {
			case <-stop:
				cancel()
			case <-ctx.Done():
			}
		}()
		err := h(srv, &ending{ServerStream: s, ctx: ctx})
		if err != nil && ctx.Err() != nil && s.Context().Err() == nil {
			return status.Error(codes.Unavailable, "the server shuts down")
		}
		return err
	}))
}

// ending is a stream whose context ends before that of its request.
type ending struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // grpc.ServerStream has it
}

// Context is part of grpc.ServerStream.
func (e *ending) Context() context.Context { return e.ctx }
