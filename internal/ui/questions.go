package ui

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	"github.com/fairlead/fairlead/internal/cli/client/status"
	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of questions.
const (
	// maxAtOnce is how many questions of one user are answered at a time: each reads lists of the API.
	maxAtOnce = 4
	// maxNamed is how many Services one question may name.
	maxNamed = 100
	// maxText is the longest value of a parameter, in bytes.
	maxText = 1024
)

// seen is the parameter with the newest version of an object that a page has seen. Pages that have seen the same share an answer. A page
// leaves it out when it has read a list again, which does not show what was deleted.
const seen = "seen"

// judgementKept is for how long a report counts for pages that have seen the same: nodes may say something else by then.
const judgementKept = 5 * time.Second

// As returns a client configuration that has the rights of the user who made a request.
type As = func(*http.Request) (*rest.Config, error)

// question is what one path answers.
type question struct {
	params []string
	// proto is set if all that it reads are typed objects, which are cheaper in Protobuf.
	proto bool
	// keep is for how long an answer counts for a user who asks the same again, in this or another page; 0 asks each time. With seen
	// among params it does so only for pages that say what they have seen.
	keep   time.Duration
	answer func(context.Context, *asking.Nodes, url.Values) (any, error)
}

func questions() map[string]question {
	return map[string]question{
		svc.ExplainPath:     {[]string{"question", "from", "node", "protocol", "namespace", "probe"}, true, 0, explain},
		svc.HistoryPath:     {[]string{"service", "node", "since"}, true, 0, history},
		svc.StatusPath:      {[]string{"namespace", "service", "services", seen}, true, judgementKept, statusOf},
		svc.ServicesPath:    {[]string{"namespace", "service", seen}, true, judgementKept, services},
		svc.ConnectionsPath: {[]string{"namespace"}, true, connectionsKept, connections},
		svc.BalancersPath:   {[]string{"namespace"}, true, balancersKept, balancers},
		svc.ObjectsPath:     {[]string{"kind", "namespace"}, true, objectsKept, objects},
	}
}

// Questions returns the handlers of svc.QuestionPaths. Their answers are the JSON of the commands 'fairlead explain', 'history' and
// 'status'; svc.ServicesPath has the Services that do not answer.
func Questions(as As) map[string]http.Handler {
	users, answers := &turns{of: map[string]int{}}, &kept{of: map[string]*keptAnswer{}}
	judgements := &kept{of: map[string]*keptAnswer{}, spill: true} // of their own: each change makes other ones
	out := map[string]http.Handler{}
	for path, q := range questions() {
		out[path] = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			from := answers
			if q.judges() {
				from = judgements
			}
			answer, err := ask(w, r, as, users, from, &q)
			w.Header().Set("Cache-Control", "no-store")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			if apierrors.IsTooManyRequests(err) {
				w.Header().Set("Retry-After", "1")
			}
			if err != nil {
				members.Reply(w, nil, withStatus(err))
				return
			}
			if p, ok := answer.(packed); ok {
				p.write(w, r)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = base.OutputFlag("json").Write(w, answer, nil) // the client is gone
		})
	}
	return out
}

// ask answers one request.
func ask(w http.ResponseWriter, r *http.Request, as As, users *turns, answers *kept, q *question) (any, error) {
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		return nil, apierrors.NewGenericServerResponse(http.StatusMethodNotAllowed, r.Method, metav1.SchemeGroupVersion.
			WithResource("questions").GroupResource(), "", "a question takes GET", 0, true)
	}
	// A browser with a client certificate sends it also for other sites.
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return nil, apierrors.NewForbidden(metav1.SchemeGroupVersion.WithResource("questions").GroupResource(), "",
			errors.New("another site asks"))
	}
	params, err := readParams(r, q.params)
	if err != nil {
		return nil, err
	}
	cfg, err := as(r)
	if err != nil {
		return nil, err
	}
	if q.keep > 0 && (params.Has(seen) || !q.judges()) {
		return answers.get(r.Context(), keyOf(r.URL.Path, &cfg.Impersonate, params), q.keep, func(ctx context.Context) (any, error) {
			return q.inTurn(ctx, users, cfg, params)
		})
	}
	return q.inTurn(r.Context(), users, cfg, params)
}

// judges reports whether pages share an answer only if they have seen the same.
func (q *question) judges() bool { return slices.Contains(q.params, seen) }

// inTurn answers unless as many questions of the user are being answered.
func (q *question) inTurn(ctx context.Context, users *turns, cfg *rest.Config, params url.Values) (any, error) {
	if !users.take(cfg.Impersonate.UserName) {
		return nil, apierrors.NewTooManyRequests(fmt.Sprintf("%d questions of this user are being answered: ask again", maxAtOnce), 1)
	}
	defer users.leave(cfg.Impersonate.UserName)
	return q.asked(ctx, cfg, params)
}

// asked answers with the rights of a configuration, which it may change.
func (q *question) asked(ctx context.Context, cfg *rest.Config, params url.Values) (any, error) {
	if q.proto {
		cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	return q.answer(ctx, asking.For(client, cfg), params)
}

func readParams(r *http.Request, known []string) (url.Values, error) {
	params, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, apierrors.NewBadRequest("cannot read the parameters: " + err.Error())
	}
	for name, values := range params {
		if !slices.Contains(known, name) {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("parameter %q is unknown; want %s", base.PlainLine(name), base.OneOf(known)))
		}
		for _, v := range values {
			if len(v) > maxText {
				return nil, apierrors.NewBadRequest(fmt.Sprintf("parameter %s is longer than %d bytes", name, maxText))
			}
			if _, err := strconv.ParseUint(v, 10, 64); err != nil && name == seen {
				return nil, apierrors.NewBadRequest(fmt.Sprintf("seen is %q; want the resourceVersion of an object, a number", base.PlainLine(v)))
			}
		}
	}
	return params, nil
}

// withStatus gives an error without a status of its own one: what a question says wrong is the asker's mistake.
func withStatus(err error) error {
	var known apierrors.APIStatus
	switch {
	case errors.As(err, &known):
		s := known.Status()
		return &apierrors.StatusError{ErrStatus: s}
	case errors.Is(err, context.DeadlineExceeded):
		return apierrors.NewTimeoutError("the answer took too long", 1)
	}
	return apierrors.NewBadRequest(base.PlainLine(err.Error()))
}

func explain(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	a := &explaincmd.Asked{Question: p.Get("question"), From: p.Get("from"), Node: p.Get("node"), Protocol: p.Get("protocol"),
		Namespace: p.Get("namespace"), Probe: true}
	if a.Namespace == "" {
		a.Namespace = metav1.NamespaceDefault
	}
	if v := p.Get("probe"); v != "" {
		probe, err := strconv.ParseBool(v)
		if err != nil {
			return nil, fmt.Errorf("probe is %q; want true or false", v)
		}
		a.Probe = probe
	}
	return explaincmd.Ask(ctx, nodes, a)
}

func history(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	names, err := namesOf(p)
	if err != nil {
		return nil, err
	}
	if len(names) != 1 {
		return nil, fmt.Errorf("service is given %d times; want one", len(names))
	}
	since := explaincmd.MaxSince
	if v := p.Get("since"); v != "" {
		if since, err = time.ParseDuration(v); err != nil || since <= 0 || since > explaincmd.MaxSince {
			return nil, fmt.Errorf("since is %q; want a time of at most %s, such as 10m", v, explaincmd.MaxSince)
		}
	}
	return explaincmd.Past(ctx, nodes, names[0], p.Get("node"), since)
}

func statusOf(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	if p.Get("service") != "" && p.Get("namespace") == "" {
		return nil, errors.New("service without namespace; want both")
	}
	list := true
	if v := p.Get("services"); v != "" {
		var err error
		if list, err = strconv.ParseBool(v); err != nil {
			return nil, fmt.Errorf("services is %q; want true or false", v)
		}
	}
	r, err := status.ReportOf(ctx, nodes.Client(), p.Get("namespace"), p.Get("service"))
	if err == nil && !list {
		r.Services = []status.ServiceReport{}
	}
	return r, err
}

func services(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	names, err := namesOf(p)
	if err != nil {
		return nil, err
	}
	return explaincmd.Judge(ctx, nodes.Client(), p.Get("namespace"), names...)
}

func connections(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	return status.ConnectionsOf(ctx, nodes, p.Get("namespace"))
}

// balancersKept is for how long the lists of load balancers and routes count: they are of many kinds of objects.
const balancersKept = 12 * time.Second

func balancers(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	return lbview.SummaryOf(ctx, nodes.Client(), nodes.Config(), p.Get("namespace"))
}

// namesOf reads the values of service, each NAMESPACE/NAME.
func namesOf(p url.Values) ([]svc.Name, error) {
	list := p["service"]
	if len(list) > maxNamed {
		return nil, fmt.Errorf("service is given %d times; want at most %d", len(list), maxNamed)
	}
	var out []svc.Name
	for _, text := range list {
		namespace, name, ok := strings.Cut(text, "/")
		if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
			return nil, fmt.Errorf("service is %q; want NAMESPACE/NAME", text)
		}
		out = append(out, svc.Name{Namespace: namespace, Name: name})
	}
	return out, nil
}

// turns counts the questions that are being answered, by user.
type turns struct {
	mu sync.Mutex
	of map[string]int
}

func (t *turns) take(user string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[user] >= maxAtOnce {
		return false
	}
	t.of[user]++
	return true
}

func (t *turns) leave(user string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[user]--; t.of[user] == 0 {
		delete(t.of, user)
	}
}
