package pod

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/registry/rest"
	translator "k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/fairlead/fairlead/internal/registry/node"
)

// defaultContainer is the annotation by which kubectl chooses a container.
const defaultContainer = "kubectl.kubernetes.io/default-container"

// streams connects clients to the agent of a Pod's node. The agent's paths are
// the paths of a kubelet.
type streams struct {
	pods   *genericregistry.Store
	agents *node.Agents
}

func (s *streams) get(ctx context.Context, name string) (*corev1.Pod, error) {
	obj, err := s.pods.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Pod), nil
}

// locate returns the URL of path elements of p's agent and how to get there.
func (s *streams) locate(ctx context.Context, p *corev1.Pod, query url.Values, path ...string) (*url.URL, http.RoundTripper, error) {
	if p.Spec.NodeName == "" {
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", p.Name))
	}
	agent, err := s.agents.Find(ctx, p.Spec.NodeName)
	if err != nil {
		return nil, nil, err
	}
	u := agent.Base
	u.Path = "/" + strings.Join(path, "/")
	u.RawQuery = query.Encode()
	return &u, agent.Transport, nil
}

// container returns the container that is meant: the named one, or the only
// one.
func container(p *corev1.Pod, name string) (string, error) {
	var names []string
	for _, c := range p.Spec.Containers {
		names = append(names, c.Name)
	}
	for _, c := range p.Spec.InitContainers {
		names = append(names, c.Name)
	}
	for _, c := range p.Spec.EphemeralContainers {
		names = append(names, c.Name)
	}
	if name == "" {
		if name = p.Annotations[defaultContainer]; name == "" && len(names) == 1 {
			name = names[0]
		}
		if name == "" {
			return "", apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, choose one of: %v", p.Name, names))
		}
	}
	if !slices.Contains(names, name) {
		return "", apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", name, p.Name))
	}
	return name, nil
}

// logREST serves pods/NAME/log.
type logREST struct{ *streams }

var (
	_ rest.GetterWithOptions = (*logREST)(nil)
	_ rest.StorageMetadata   = (*logREST)(nil)
)

func (*logREST) New() runtime.Object { return &corev1.Pod{} }

func (*logREST) Destroy() {}

// ProducesMIMETypes returns the type of logs.
func (*logREST) ProducesMIMETypes(string) []string { return []string{"text/plain"} }

// ProducesObject returns what the text looks like in OpenAPI: a string.
func (*logREST) ProducesObject(string) any { return "" }

// NewGetOptions returns the options of a log.
func (*logREST) NewGetOptions() (runtime.Object, bool, string) {
	return &corev1.PodLogOptions{}, false, ""
}

// Get returns a stream of the log.
func (r *logREST) Get(ctx context.Context, name string, options runtime.Object) (runtime.Object, error) {
	o, ok := options.(*corev1.PodLogOptions)
	if !ok {
		return nil, fmt.Errorf("invalid options object: %#v", options)
	}
	if errs := validateLog(o); len(errs) > 0 {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("PodLogOptions").GroupKind(), name, errs)
	}
	p, err := r.get(ctx, name)
	if err != nil {
		return nil, err
	}
	c, err := container(p, o.Container)
	if err != nil {
		return nil, err
	}
	out := &genericrest.LocationStreamer{
		ContentType: "text/plain", Flush: o.Follow,
		ResponseChecker: genericrest.NewGenericHttpResponseChecker(corev1.Resource("pods/log"), name),
		RedirectChecker: genericrest.PreventRedirects,
	}
	if p.Spec.NodeName == "" {
		return out, nil // nothing runs yet: an empty log
	}
	out.Location, out.Transport, err = r.locate(ctx, p, logQuery(o), "containerLogs", p.Namespace, p.Name, c)
	return out, err
}

func validateLog(o *corev1.PodLogOptions) (errs field.ErrorList) {
	if o.TailLines != nil && *o.TailLines < 0 {
		errs = append(errs, field.Invalid(field.NewPath("tailLines"), *o.TailLines, "must be greater than or equal to 0"))
	}
	if o.LimitBytes != nil && *o.LimitBytes < 1 {
		errs = append(errs, field.Invalid(field.NewPath("limitBytes"), *o.LimitBytes, "must be greater than 0"))
	}
	switch {
	case o.SinceSeconds != nil && o.SinceTime != nil:
		errs = append(errs, field.Forbidden(field.NewPath(""), "at most one of `sinceTime` or `sinceSeconds` may be specified"))
	case o.SinceSeconds != nil && *o.SinceSeconds < 1:
		errs = append(errs, field.Invalid(field.NewPath("sinceSeconds"), *o.SinceSeconds, "must be greater than 0"))
	}
	return errs
}

func logQuery(o *corev1.PodLogOptions) url.Values {
	q := url.Values{}
	flag(q, "follow", o.Follow)
	flag(q, "previous", o.Previous)
	flag(q, "timestamps", o.Timestamps)
	for k, v := range map[string]*int64{"sinceSeconds": o.SinceSeconds, "tailLines": o.TailLines, "limitBytes": o.LimitBytes} {
		if v != nil {
			q.Set(k, strconv.FormatInt(*v, 10))
		}
	}
	if o.SinceTime != nil {
		q.Set("sinceTime", o.SinceTime.Format(time.RFC3339))
	}
	if o.Stream != nil {
		q.Set("stream", *o.Stream)
	}
	return q
}

func flag(q url.Values, key string, on bool) {
	if on {
		q.Set(key, "true")
	}
}

// connectMethods are POST, and GET for WebSocket clients.
func connectMethods() []string { return []string{"GET", "POST"} }

var (
	_ rest.Connecter = (*execREST)(nil)
	_ rest.Connecter = (*attachREST)(nil)
	_ rest.Connecter = (*portForwardREST)(nil)
)

// execREST serves pods/NAME/exec.
type execREST struct{ *streams }

func (*execREST) New() runtime.Object      { return &corev1.PodExecOptions{} }
func (*execREST) Destroy()                 {}
func (*execREST) ConnectMethods() []string { return connectMethods() }

// NewConnectOptions returns the options of an exec.
func (*execREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodExecOptions{}, false, ""
}

// Connect returns the handler of one exec.
func (r *execREST) Connect(ctx context.Context, name string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := options.(*corev1.PodExecOptions)
	if !ok {
		return nil, fmt.Errorf("invalid options object: %#v", options)
	}
	if len(o.Command) == 0 {
		return nil, apierrors.NewBadRequest("you must specify at least 1 command for the container")
	}
	q := streamQuery(o.Stdin, o.Stdout, o.Stderr, o.TTY)
	q["command"] = o.Command
	return r.run(ctx, "exec", name, o.Container, q, translator.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY},
		responder)
}

// attachREST serves pods/NAME/attach.
type attachREST struct{ *streams }

func (*attachREST) New() runtime.Object      { return &corev1.PodAttachOptions{} }
func (*attachREST) Destroy()                 {}
func (*attachREST) ConnectMethods() []string { return connectMethods() }

// NewConnectOptions returns the options of an attach.
func (*attachREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodAttachOptions{}, false, ""
}

// Connect returns the handler of one attach.
func (r *attachREST) Connect(ctx context.Context, name string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := options.(*corev1.PodAttachOptions)
	if !ok {
		return nil, fmt.Errorf("invalid options object: %#v", options)
	}
	return r.run(ctx, "attach", name, o.Container, streamQuery(o.Stdin, o.Stdout, o.Stderr, o.TTY),
		translator.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY}, responder)
}

func (s *streams) run(ctx context.Context, verb, name, containerName string, q url.Values, o translator.Options,
	responder rest.Responder) (http.Handler, error) {
	if !o.Stdin && !o.Stdout && !o.Stderr {
		return nil, apierrors.NewBadRequest("you must specify at least one of stdin, stdout, stderr")
	}
	p, err := s.get(ctx, name)
	if err != nil {
		return nil, err
	}
	if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("cannot %s into a container in a completed pod; current phase is %s", verb,
			p.Status.Phase))
	}
	c, err := container(p, containerName)
	if err != nil {
		return nil, err
	}
	u, transport, err := s.locate(ctx, p, q, verb, p.Namespace, p.Name, c)
	if err != nil {
		return nil, err
	}
	spdy := proxy.NewUpgradeAwareHandler(u, transport, false, true, proxy.NewErrorResponder(responder))
	// Clients of Kubernetes 1.30 and later speak WebSocket with a way to close
	// stdin; the agent is spoken to in SPDY.
	websocket := translator.NewStreamTranslatorHandler(u, transport, 0, o)
	return translator.NewTranslatingHandler(spdy, websocket, wsstream.IsWebSocketRequestWithStreamCloseProtocol), nil
}

// streamQuery names the streams as a kubelet does.
func streamQuery(stdin, stdout, stderr, tty bool) url.Values {
	q := url.Values{}
	for k, on := range map[string]bool{
		corev1.ExecStdinParam: stdin, corev1.ExecStdoutParam: stdout, corev1.ExecStderrParam: stderr && !tty, corev1.ExecTTYParam: tty,
	} {
		if on {
			q.Set(k, "1")
		}
	}
	return q
}

// portForwardREST serves pods/NAME/portforward.
type portForwardREST struct{ *streams }

func (*portForwardREST) New() runtime.Object      { return &corev1.PodPortForwardOptions{} }
func (*portForwardREST) Destroy()                 {}
func (*portForwardREST) ConnectMethods() []string { return connectMethods() }

// NewConnectOptions returns the options of a port forward.
func (*portForwardREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodPortForwardOptions{}, false, ""
}

// Connect returns the handler of one port forward.
func (r *portForwardREST) Connect(ctx context.Context, name string, options runtime.Object, responder rest.Responder) (http.Handler,
	error) {
	o, ok := options.(*corev1.PodPortForwardOptions)
	if !ok {
		return nil, fmt.Errorf("invalid options object: %#v", options)
	}
	p, err := r.get(ctx, name)
	if err != nil {
		return nil, err
	}
	q := url.Values{}
	for _, port := range o.Ports {
		q.Add(corev1.PortHeader, strconv.Itoa(int(port)))
	}
	u, transport, err := r.locate(ctx, p, q, "portForward", p.Namespace, p.Name)
	if err != nil {
		return nil, err
	}
	spdy := proxy.NewUpgradeAwareHandler(u, transport, false, true, proxy.NewErrorResponder(responder))
	return translator.NewTranslatingHandler(spdy, translator.NewTunnelingHandler(spdy), wsstream.IsWebSocketRequestWithTunnelingProtocol), nil
}
