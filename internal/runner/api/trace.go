package api

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Trace sends the packet of a query and returns a report of its way, as JSON. Its errors are those of a View.
type Trace func(ctx context.Context, from Sender, query url.Values) (any, error)

// Sender is who sends the packet of a Trace: this node, or a Pod of it.
type Sender struct {
	// Pod is NAMESPACE/NAME, empty for the node itself.
	Pod string
	// Netns is the file of its network namespace, empty for that of the node.
	Netns string
	// Guest is set if the user has no rights on the node, but only on the Pod.
	Guest bool
}

// serveTrace answers POST /trace and, for a Pod, /trace/NAMESPACE/NAME. Users without rights on the node come by the Pod's own
// subresource, and so to /podTrace/NAMESPACE/NAME.
func (s *Server) serveTrace(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	if s.o.Trace == nil {
		return httpError{http.StatusNotFound, "this agent cannot trace packets"}
	}
	from := Sender{Guest: strings.HasPrefix(q.URL.Path, "/podTrace/")}
	if q.PathValue("pod") != "" {
		p, err := s.find(q)
		if err != nil {
			return err
		}
		if p.NetnsPID == 0 && !p.HostNetwork {
			return badRequest("pod %q is not running", p.Name)
		}
		from.Pod = p.Namespace + "/" + p.Name
		if !p.HostNetwork {
			from.Netns = netns.Of(p.NetnsPID)
		}
	}
	serveView(ctx, func(ctx context.Context, query url.Values) (any, error) { return s.o.Trace(ctx, from, query) }, w, q)
	return nil
}

// RequestView is the name of the View that Requests returns.
const RequestView = "request"

// RequestAnswer is the answer of Requests.
type RequestAnswer struct {
	Node string `json:"node"`
	// Armed is false if the ID is not armed any more.
	Armed    bool           `json:"armed"`
	Requests []request.Seen `json:"requests,omitempty"`
}

// Requests is the View of the requests that users trace. Its query has id, 32 hexadecimal digits, and arm=true to have the requests with
// that ID kept that begin within request.ArmedFor. It shows requests only to who knows their ID, of 16 random bytes: who has
// armed it, and the Pods that get the request.
func Requests(node string, w *request.Watch) View {
	return func(_ context.Context, query url.Values) (any, error) {
		id := query.Get("id")
		if query.Get("arm") == "true" {
			switch err := w.Arm(id); {
			case errors.Is(err, request.ErrFull):
				return nil, Busy(err.Error())
			case err != nil:
				return nil, BadQuery("id: " + err.Error())
			}
		}
		out := RequestAnswer{Node: node}
		out.Requests, out.Armed = w.Seen(id)
		return out, nil
	}
}
