package pods

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asnode"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
)

const (
	// written begins the files that 'fairlead register' writes. It changes and removes no others.
	written = "# Written by 'fairlead register'; 'fairlead deregister' removes it.\n"
	// takenWithin is how long an agent may take to see a file, agentPoll the time between two looks at what it has done.
	takenWithin = 15 * time.Second
	agentPoll   = 200 * time.Millisecond
)

// agent registers programs by files for the agent of this node.
type agent struct {
	base.AgentRecord
	client kubernetes.Interface
}

// agentOf returns the agent of this machine. why is the reason not to ask as an administrator.
func agentOf(why error, f *base.ClientFlags) (*agent, error) {
	record, err := asnode.Record(why, f)
	if err != nil {
		return nil, err
	}
	if record.ServicesDir == "" {
		return nil, fmt.Errorf("node %s has no kubeconfig of an administrator, and its agent no --services-dir: run this where there is a "+
			"kubeconfig, with --node %s", record.Node, record.Node)
	}
	cfg, err := asnode.Config(&record, f.DataDir)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(cfg)
	return &agent{record, client}, err
}

// may returns an error with the command that allows nodes to register programs in a namespace, unless they may.
func (a *agent) may(ctx context.Context, namespace string) error {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "use", Resource: "pods", Subresource: "privileged", Namespace: namespace},
	}}
	limited, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	answer, err := a.client.AuthorizationV1().SelfSubjectAccessReviews().Create(limited, review, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("cannot ask whether node %s may register programs: %w", a.Node, err)
	}
	if answer.Status.Allowed {
		return nil
	}
	return fmt.Errorf("node %s may not register programs in namespace %s: run this where there is a kubeconfig of an administrator, with "+
		"--node %s; or have an administrator allow it with "+
		"'kubectl create rolebinding nodes-register --namespace %s --clusterrole %s --group %s'",
		a.Node, namespace, a.Node, namespace, svc.NodeRegistrarRole, svc.NodesGroup)
}

// file returns the file of a program.
func (a *agent) file(namespace, name string) string {
	if namespace != metav1.NamespaceDefault {
		name = namespace + "." + name
	}
	return filepath.Join(a.ServicesDir, name+".yaml")
}

// read returns the file of a program, and its Spec; nil if there is none. A file of another author is an error.
func (a *agent) read(path string) ([]byte, *registration.Spec, error) {
	have, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, nil
	case errors.Is(err, fs.ErrPermission):
		return nil, nil, fmt.Errorf("no permission to read %s: run this as root", path)
	case err != nil:
		return nil, nil, err
	case !bytes.HasPrefix(have, []byte(written)):
		return nil, nil, fmt.Errorf("%s was not written by 'fairlead register': change or remove it yourself", path)
	}
	specs, err := registration.Parse(path, a.Node, have)
	if err != nil || len(specs) != 1 {
		return have, &registration.Spec{}, nil //nolint:nilerr // it is replaced
	}
	return have, &specs[0], nil
}

// byAgent registers the programs by the agent of this node. why is the reason not to do it as an administrator.
func (r *registerCommand) byAgent(cmd *cobra.Command, why error, specs []registration.Spec) error {
	ctx := cmd.Context()
	a, err := agentOf(why, &r.ClientFlags)
	if err != nil {
		return err
	}
	if r.spec.Node != a.Node && (r.via != "" || cmd.Flags().Changed("node")) {
		return fmt.Errorf("node %s only registers programs itself: for node %s run this where there is a kubeconfig of an administrator", a.Node,
			r.spec.Node)
	}
	var errs []error
	for i := range specs {
		s := &specs[i]
		s.Node, s.Namespace = a.Node, cmp.Or(s.Namespace, r.Namespace, metav1.NamespaceDefault)
		if err := r.registerBy(ctx, a, s); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.Name, err))
		}
	}
	if !r.hook || len(errs) > 0 {
		return errors.Join(errs...)
	}
	pod, err := specs[0].Pod()
	if err != nil {
		return err
	}
	return r.installHook(ctx, pod)
}

// registerBy writes the file of a program and awaits what the agent makes of it.
func (r *registerCommand) registerBy(ctx context.Context, a *agent, s *registration.Spec) error {
	if err := a.may(ctx, s.Namespace); err != nil {
		return err
	}
	path := a.file(s.Namespace, s.Name)
	s.File = path
	pod, err := s.Pod()
	if err != nil {
		return err
	}
	text, err := s.Document()
	if err != nil {
		return err
	}
	text = append([]byte(written), text...)
	have, old, err := a.read(path)
	if err != nil {
		return err
	}
	if old != nil && old.Unit != "" && old.Unit != s.Unit {
		if _, err := systemd.RemoveHook(ctx, old.Unit); err != nil {
			return err
		}
	}
	what := "is registered already"
	if !bytes.Equal(have, text) {
		what = "registered"
		if err := a.write(path, text); err != nil {
			return err
		}
	}
	last, err := a.await(ctx, pod.Namespace, pod.Name, max(r.timeout, takenWithin), func(p *corev1.Pod) bool {
		return p != nil && registration.Same(p, pod)
	})
	if err != nil {
		return fmt.Errorf("%w; %s is written: look at the log of the agent", err, path)
	}
	fmt.Fprintf(r.Out, "%s %s on node %s as pod %s, by %s\n", s.Name, what, a.Node, last.Name, path)
	if r.timeout <= 0 {
		return nil
	}
	last, err = a.await(ctx, pod.Namespace, pod.Name, r.timeout, func(p *corev1.Pod) bool { return p != nil && ready(p) })
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		fmt.Fprintf(r.Out, "%s is ready at %s\n", s.Name, last.Status.PodIP)
	case last != nil:
		fmt.Fprintf(r.Err, "%s is not ready yet: %s\n", s.Name, base.PodTrouble(last))
	default:
		return err
	}
	return nil
}

// write writes a file for the agent, which takes only root's.
func (a *agent) write(path string, text []byte) error {
	err := os.MkdirAll(a.ServicesDir, 0o755)
	if err == nil {
		err = fileio.Replace(path, text, 0o644)
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("no permission to write %s: run this as root", path)
	}
	return err
}

// await asks for a Pod of this node until it is as wanted, for limit at most, and returns it as it was last; nil stands for none.
func (a *agent) await(
	ctx context.Context, namespace, name string, limit time.Duration, wanted func(*corev1.Pod) bool,
) (*corev1.Pod, error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var last *corev1.Pod
	for {
		p, err := a.client.CoreV1().Pods(namespace).Get(limited, name, metav1.GetOptions{})
		switch {
		case err == nil:
			last = p
		case apierrors.IsNotFound(err) || apierrors.IsForbidden(err): // a node may ask only for Pods of its own
			p = nil
		default:
			return last, err
		}
		if wanted(p) {
			return last, nil
		}
		select {
		case <-limited.Done():
			return last, fmt.Errorf("the agent of node %s has not done it within %s", a.Node, limit)
		case <-time.After(agentPoll):
		}
	}
}

// deregisterByAgent removes the files of programs, and awaits that the agent removes their Pods.
func deregisterByAgent(cmd *cobra.Command, out io.Writer, why error, f *base.ClientFlags, names []string) error {
	ctx := cmd.Context()
	a, err := agentOf(why, f)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if err := a.deregister(ctx, cmp.Or(f.Namespace, metav1.NamespaceDefault), name); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		fmt.Fprintf(out, "%s is no longer registered on node %s\n", name, a.Node)
	}
	return errors.Join(errs...)
}

func (a *agent) deregister(ctx context.Context, namespace, name string) error {
	// Both become the name of a file.
	if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		return fmt.Errorf("not the name of a program: %s", strings.Join(errs, "; "))
	}
	if errs := validation.IsDNS1123Label(namespace); len(errs) > 0 {
		return fmt.Errorf("%s is not a namespace: %s", namespace, strings.Join(errs, "; "))
	}
	path := a.file(namespace, name)
	have, old, err := a.read(path)
	switch {
	case err != nil:
		return err
	case have == nil:
		return fmt.Errorf("this node has not registered it: there is no %s", path)
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	if old.Unit != "" {
		if _, err := systemd.RemoveHook(ctx, old.Unit); err != nil {
			return err
		}
	}
	_, err = a.await(ctx, namespace, registration.PodName(name, a.Node), takenWithin, func(p *corev1.Pod) bool { return p == nil })
	return err
}
