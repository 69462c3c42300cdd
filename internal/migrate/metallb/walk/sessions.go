package walk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// nodes are what a walk does where pools are announced by BGP: it changes one node after another.
type nodes struct{ *Walk }

// take takes a step that only BGP has.
func (w nodes) take(ctx context.Context, step metallb.Step) error {
	switch step.Action {
	case metallb.ApplyPeers:
		return w.act.Within(ctx, w.applyPeers)
	case metallb.FreePeers:
		return w.act.Within(ctx, func(ctx context.Context) error { return w.restrictPeers(ctx, false) })
	case metallb.HoldPeers:
		return w.holdPeers(ctx)
	case metallb.MoveNodes:
		return w.eachNode(ctx, w.moveNode)
	case metallb.ReturnNodes:
		return w.eachNode(ctx, w.returnNode)
	}
	return w.renewPods(ctx)
}

// applyPeers makes the BGPPeers, of the nodes that are moved. MetalLB's objects count, as nodes still have its sessions. A peer of the
// same name that is not of a migration is an error.
func (w nodes) applyPeers(ctx context.Context) error {
	for _, want := range w.plan.Peers() {
		have, err := w.LB.Peers.Get(ctx, want.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			_, err = w.LB.Peers.Create(ctx, want, metav1.CreateOptions{FieldManager: act.Manager})
		case err != nil:
		case have.Labels[metallb.PoolLabel] == "":
			err = fmt.Errorf("the BGPPeer %s of fairlead.dev has the name of one of MetalLB: delete it first", want.Name)
		case !equality.Semantic.DeepEqual(have.Spec, want.Spec):
			have.Spec = want.Spec
			_, err = w.LB.Peers.Update(ctx, have, metav1.UpdateOptions{FieldManager: act.Manager})
		}
		if err != nil {
			return fmt.Errorf("BGPPeer %s: %w", want.Name, err)
		}
	}
	return nil
}

// restrictPeers makes the peers of a migration select only nodes that are moved, or removes that selector. Other changes of them stay.
func (w nodes) restrictPeers(ctx context.Context, moved bool) error {
	list, err := w.LB.Peers.List(ctx, metav1.ListOptions{LabelSelector: metallb.PoolLabel})
	if err != nil {
		return err
	}
	for i := range list.Items {
		peer := &list.Items[i]
		if !metallb.Restrict(peer, moved) {
			continue
		}
		if _, err := w.LB.Peers.Update(ctx, peer, metav1.UpdateOptions{FieldManager: act.Manager}); err != nil {
			return fmt.Errorf("BGPPeer %s: %w", peer.Name, err)
		}
	}
	return nil
}

// copyPasswords makes the Secrets with the passwords of the peers. One of the same name that is not of a migration must have the same.
func (w nodes) copyPasswords(ctx context.Context) error {
	api := w.Client.CoreV1().Secrets(svc.SystemNamespace)
	for _, name := range w.plan.Secrets() {
		want := []byte(w.plan.Password(name))
		if len(want) == 0 {
			return fmt.Errorf("MetalLB has no password for the Secret %s/%s", svc.SystemNamespace, name)
		}
		have, err := api.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			made := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{metallb.PoolLabel: "true"}}}
			made.Data = map[string][]byte{v1.PasswordKey: want}
			_, err = api.Create(ctx, made, metav1.CreateOptions{FieldManager: act.Manager})
		case err != nil || bytes.Equal(have.Data[v1.PasswordKey], want):
		case have.Labels[metallb.PoolLabel] == "":
			err = errors.New("it has another password than MetalLB's: delete it first")
		default:
			have.Data = map[string][]byte{v1.PasswordKey: want}
			_, err = api.Update(ctx, have, metav1.UpdateOptions{FieldManager: act.Manager})
		}
		if err != nil {
			return fmt.Errorf("the Secret %s/%s: %w", svc.SystemNamespace, name, err)
		}
	}
	return nil
}

// holdPeers makes the peers select only nodes that are moved. Before, all nodes get that label, and their speakers the time to see it.
func (w nodes) holdPeers(ctx context.Context) error {
	added := false
	err := w.eachNode(ctx, func(ctx context.Context, node string) error {
		label, err := w.label(ctx, node)
		if err != nil || label == metallb.Moved {
			return err
		}
		added = true
		return w.setLabel(ctx, node, metallb.Moved)
	})
	if err == nil && added {
		err = w.settle(ctx)
	}
	if err != nil {
		return err
	}
	return w.act.Within(ctx, func(ctx context.Context) error { return w.restrictPeers(ctx, true) })
}

// sessions reads what announces by BGP now. It takes Services and endpoints from before, if that is not nil.
func (w nodes) sessions(ctx context.Context, before *metallb.Sessions) (*metallb.Sessions, error) {
	list, err := w.LB.Speakers.List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	if err != nil { // the cluster does not know the kind
		return metallb.LookAtSessions(ctx, w.Client, w.plan.Speaker(), nil, before)
	}
	return metallb.LookAtSessions(ctx, w.Client, w.plan.Speaker(), list.Items, before)
}

// announcing says what announces the addresses after a failure: a node that changes its sessions does not.
func (w nodes) announcing(ctx context.Context) string {
	stays := "What announces the addresses stays"
	if !w.plan.BGP() {
		return stays
	}
	s, err := w.sessions(ctx, nil)
	if err != nil {
		return "A node that changes its sessions may announce nothing; the others announce"
	}
	var between []string
	for _, n := range s.Nodes {
		if l := n.Labels[metallb.NodeLabel]; l == metallb.Leaving || l == metallb.Coming || l == metallb.Moved && !w.has(s, n.Name) {
			between = append(between, n.Name)
		}
	}
	if len(between) == 0 {
		return stays
	}
	return fmt.Sprintf("The sessions of node %s change: it announces nothing, or not all; the other nodes announce",
		strings.Join(between, ", "))
}

// has reports whether fairlead lb has the sessions of a node.
func (w nodes) has(s *metallb.Sessions, node string) bool { return w.plan.Established(s, node) == nil }

// eachNode calls do for the nodes of the speakers, until it fails.
func (w nodes) eachNode(ctx context.Context, do func(context.Context, string) error) error {
	s, err := w.sessions(ctx, nil)
	if err != nil {
		return err
	}
	for i := range s.Nodes {
		name := s.Nodes[i].Name
		if err := do(ctx, name); err != nil {
			return fmt.Errorf("node %s: %w", name, err)
		}
	}
	return nil
}

// servicesAge is how long a wait uses the Services and endpoints that it has read: there may be very many.
const servicesAge = 10 * time.Second

// until waits until a check of what announces returns nil.
func (w nodes) until(ctx context.Context, node string, check func(*metallb.Sessions, string) error) error {
	var before *metallb.Sessions
	var read time.Time
	return w.act.Within(ctx, func(ctx context.Context) error {
		if time.Since(read) > servicesAge {
			before, read = nil, time.Now()
		}
		s, err := w.sessions(ctx, before)
		if err != nil {
			return err
		}
		before = s
		return check(s, node)
	})
}

// moveNode gives fairlead lb the sessions of a node, which MetalLB has. It ends when fairlead lb announces there what it has to.
func (w nodes) moveNode(ctx context.Context, node string) error {
	label, err := w.label(ctx, node)
	if err != nil {
		return err
	}
	if label == "" {
		if err := w.until(ctx, node, w.plan.Last); err != nil {
			return err
		}
		if err := w.setLabel(ctx, node, metallb.Leaving); err != nil {
			return err
		}
	}
	if label != metallb.Moved {
		if err := w.act.Within(ctx, func(ctx context.Context) error { return w.speakerGone(ctx, node) }); err != nil {
			return err
		}
		if err := w.setLabel(ctx, node, metallb.Moved); err != nil {
			return err
		}
	}
	if err := w.until(ctx, node, w.plan.Established); err != nil {
		return err
	}
	fmt.Fprintf(w.Out, "load balancers: node %s announces with fairlead lb\n", node)
	return nil
}

// returnNode gives MetalLB the sessions of a node, which fairlead lb has. It ends when MetalLB has them.
func (w nodes) returnNode(ctx context.Context, node string) error {
	label, err := w.label(ctx, node)
	if err != nil {
		return err
	}
	if label == metallb.Moved {
		if err := w.until(ctx, node, w.plan.Last); err != nil {
			return err
		}
		if err := w.setLabel(ctx, node, metallb.Coming); err != nil {
			return err
		}
	}
	if label != "" {
		if err := w.until(ctx, node, w.plan.Ended); err != nil {
			return err
		}
		if err := w.setLabel(ctx, node, ""); err != nil {
			return err
		}
	}
	return w.speakerUp(ctx, node, func(p *corev1.Pod) bool { return p.Labels[metallb.HeldLabel] != "" })
}

// renewPods gives MetalLB's speakers the template that they had before. Pods of the other one are replaced one by one.
func (w nodes) renewPods(ctx context.Context) error {
	err := w.act.Within(ctx, func(ctx context.Context) error {
		return w.update(ctx, w.plan.Phase, func(d *appsv1.DaemonSet) (*appsv1.DaemonSet, error) { return w.plan.Released(d), nil })
	})
	if err != nil {
		return err
	}
	return w.eachNode(ctx, func(ctx context.Context, node string) error {
		pods, err := w.speakersOn(ctx, node)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].Labels[metallb.HeldLabel] == "" {
				continue
			}
			if err := w.until(ctx, node, w.plan.Last); err != nil {
				return err
			}
			err := w.Client.CoreV1().Pods(pods[i].Namespace).Delete(ctx, pods[i].Name, metav1.DeleteOptions{})
			if !fine(err) {
				return err
			}
			if err := w.speakerUp(ctx, node, func(p *corev1.Pod) bool { return p.Labels[metallb.HeldLabel] == "" }); err != nil {
				return err
			}
		}
		return nil
	})
}

// speakersOn are MetalLB's Pods on a node.
func (w nodes) speakersOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	s := w.plan.Speaker()
	pods, err := w.pods(ctx, s.Namespace, s.Spec.Selector)
	return slices.DeleteFunc(pods, func(p corev1.Pod) bool { return p.Spec.NodeName != node }), err
}

// speakerGone returns an error for a Pod of MetalLB on a node.
func (w nodes) speakerGone(ctx context.Context, node string) error {
	pods, err := w.speakersOn(ctx, node)
	if err == nil && len(pods) > 0 {
		err = fmt.Errorf("the Pod %s still runs", pods[0].Name)
	}
	return err
}

// speakerUp waits until MetalLB's speaker on a node is ready and has its sessions. Only a Pod that fits is asked for them: others
// have run all the time.
func (w nodes) speakerUp(ctx context.Context, node string, fits func(*corev1.Pod) bool) error {
	fitting := false
	err := w.act.Within(ctx, func(ctx context.Context) error {
		pods, err := w.speakersOn(ctx, node)
		if err != nil {
			return err
		}
		if len(pods) == 0 {
			return errors.New("MetalLB has no speaker there")
		}
		for i := range pods {
			if p := &pods[i]; p.DeletionTimestamp != nil || !workloads.IsReady(p) {
				return fmt.Errorf("the Pod %s is not ready: %s %s", p.Name, p.Status.Phase, act.Report(p))
			}
		}
		fitting = fits(&pods[0])
		return nil
	})
	if err != nil || !fitting {
		return err
	}
	s, err := w.sessions(ctx, nil)
	if err != nil {
		return err
	}
	routers := w.plan.Routers(s, node)
	if len(routers) == 0 {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	if err := w.act.RunPod(within, w.sessionPod(node, routers)); err != nil {
		return err
	}
	fmt.Fprintf(w.Out, "load balancers: node %s announces with MetalLB\n", node)
	return nil
}

// sessionPod is a Pod that ends when its node has had connections with routers for the time that MetalLB has to announce.
func (w nodes) sessionPod(node string, routers []string) *corev1.Pod {
	pod := migrate.Once(w.plan.Ours(w.base, w.Image), "sessions", "metallb", node)
	within := max(w.Timeout-2*settling, settling).Round(time.Second)
	pod.Spec.Containers[0].Args = []string{
		"migrate", "check-sessions", "--routers=" + strings.Join(routers, ","), fmt.Sprintf("--for=%s", settling),
		fmt.Sprintf("--within=%s", within),
	}
	return pod
}

// label is the NodeLabel of a node.
func (w nodes) label(ctx context.Context, node string) (string, error) {
	n, err := w.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	switch l := n.Labels[metallb.NodeLabel]; l {
	case "", metallb.Leaving, metallb.Moved, metallb.Coming:
		return l, nil
	default:
		return "", fmt.Errorf("its label %s is %q; want none, %s, %s or %s", metallb.NodeLabel, l, metallb.Leaving, metallb.Moved,
			metallb.Coming)
	}
}

// setLabel gives a node its NodeLabel, or takes it away if that is empty.
func (w nodes) setLabel(ctx context.Context, node, to string) error {
	var value any
	if to != "" {
		value = to
	}
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{metallb.NodeLabel: value}}})
	if err != nil {
		return err
	}
	return w.act.Within(ctx, func(ctx context.Context) error {
		_, err := w.Client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, text, metav1.PatchOptions{FieldManager: act.Manager})
		return err
	})
}
