// Package walk takes the steps of package migrate on a cluster. All that it knows of a migration is in the API: the phase of
// each node is a label, and why its last step failed an annotation. So an interrupted walk is continued by another one.
package walk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/act"
)

// Options are the options of a Walk.
type Options struct {
	Client kubernetes.Interface
	// Out gets a line for each step.
	Out io.Writer
	// Nodes are the names of the nodes to change, empty for all.
	Nodes []string
	// Image is fairlead's; empty for the one of the cluster's DaemonSet, or of the manifest where there is none yet.
	Image string
	// Timeout bounds each wait.
	Timeout time.Duration
	// EndConnections removes kube-proxy's rules although connections go on through them (migrate.Drain).
	EndConnections bool
}

// Walk is one run of apply, verify or rollback.
type Walk struct {
	Options
	cluster *migrate.Cluster
	plan    *migrate.Plan
	objects *objects
	act     *act.Cluster
	// draining are the nodes that keep kube-proxy's last rules for connections.
	draining int
}

// New looks at the cluster.
func New(ctx context.Context, o Options) (*Walk, error) {
	c, err := Look(ctx, o.Client)
	if err != nil {
		return nil, err
	}
	w := &Walk{
		Options: o, cluster: c, plan: migrate.Decide(c, o.Nodes), act: &act.Cluster{Client: o.Client, Timeout: o.Timeout},
	}
	if err := w.plan.Mistakes(); err != nil {
		return nil, err
	}
	if w.Image == "" && c.Fairlead != nil {
		w.Image = c.Fairlead.Spec.Template.Spec.Containers[0].Image
	}
	if w.plan.Settings() != nil {
		w.objects, err = newObjects(c.KubeProxy, w.plan.Settings(), w.Image)
	}
	return w, err
}

// Plan is what the walk will do, and what it refuses.
func (w *Walk) Plan() *migrate.Plan { return w.plan }

// Apply changes nodes one by one to fairlead proxy.
func (w *Walk) Apply(ctx context.Context) error {
	if err := w.refused(); err != nil {
		return err
	}
	if err := w.act.Apply(ctx, w.objects.all); err != nil {
		return err
	}
	if err := w.exclude(ctx); err != nil {
		return err
	}
	if err := w.sameImage(ctx); err != nil {
		return err
	}
	fmt.Fprintln(w.Out, "kube-proxy and fairlead proxy have their DaemonSets")
	err := w.each(ctx, func(n migrate.NodePlan) error { return w.change(ctx, n, false) })
	if err == nil {
		w.report()
	}
	return err
}

// report prints how to go on with nodes that keep rules for connections.
func (w *Walk) report() {
	if w.draining > 0 {
		fmt.Fprintf(w.Out, "new connections meet fairlead proxy on these nodes; nodes that keep kube-proxy's last rules for open "+
			"connections: %d. Run 'fairlead migrate apply' again when they have ended, or with --end-connections to end them\n", w.draining)
	}
}

// Rollback changes nodes one by one back to kube-proxy. With the last one it removes what Apply has added to the cluster.
func (w *Walk) Rollback(ctx context.Context) error {
	if w.plan.Settings() == nil {
		return w.refused()
	}
	err := w.each(ctx, func(n migrate.NodePlan) error {
		if n.Phase == migrate.Before {
			return nil
		}
		return w.change(ctx, n, true)
	})
	if err != nil {
		return err
	}
	if w.cluster, err = Look(ctx, w.Client); err != nil {
		return err
	}
	if w.cluster.KubeProxy == nil {
		return errors.New("the DaemonSet kube-proxy was deleted: fairlead proxy stays")
	}
	for _, n := range w.cluster.Nodes {
		if phase := n.Labels[migrate.Label]; phase != "" {
			fmt.Fprintf(w.Out, "the DaemonSets stay: node %s is in phase %s\n", n.Name, phase)
			return nil
		}
	}
	if err := w.include(ctx); err != nil {
		return err
	}
	if err := w.act.Remove(ctx, w.objects.all); err != nil {
		return err
	}
	fmt.Fprintln(w.Out, "the cluster is as it was before: kube-proxy runs on every node")
	return nil
}

// Verify checks every node where it is. The error is about all nodes that fail.
func (w *Walk) Verify(ctx context.Context) error {
	if w.plan.Settings() == nil {
		return w.refused()
	}
	if w.cluster.Fairlead == nil { // whose account the Pods that check have
		return errors.New("the cluster has no DaemonSet of fairlead proxy: there is nothing to verify before 'fairlead migrate apply'")
	}
	var failed []string
	err := w.each(ctx, func(n migrate.NodePlan) error {
		for _, step := range migrate.Verification(n.Phase) {
			if err := w.take(ctx, n.Name, step); err != nil {
				failed = append(failed, n.Name)
				fmt.Fprintf(w.Out, "%s: FAILED (%s): %v\n", n.Name, n.Phase, err)
				return ctx.Err()
			}
			fmt.Fprintf(w.Out, "%s: ok (%s)\n", n.Name, n.Phase)
		}
		return nil
	})
	if err == nil && len(failed) > 0 {
		err = fmt.Errorf("%d nodes fail: %s", len(failed), strings.Join(failed, ", "))
	}
	return err
}

func (w *Walk) refused() error {
	if r := w.plan.Refused; len(r) > 0 {
		return fmt.Errorf("nothing was changed: %s", strings.Join(r, "; "))
	}
	return nil
}

// each calls do for the nodes that are not skipped, until it fails.
func (w *Walk) each(ctx context.Context, do func(migrate.NodePlan) error) error {
	for _, n := range w.plan.Nodes {
		if n.Skipped != "" {
			fmt.Fprintf(w.Out, "%s: left as it is: %s\n", n.Name, n.Skipped)
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := do(n); err != nil {
			return err
		}
	}
	return nil
}

// change takes a node to the end of its way, or to where it keeps rules for connections. A failure is noted on the Node.
func (w *Walk) change(ctx context.Context, n migrate.NodePlan, back bool) error {
	phase := n.Phase
	for {
		steps := migrate.Steps(phase, back, w.plan.Settings().Drains())
		if len(steps) == 0 {
			fmt.Fprintf(w.Out, "%s: done: %s\n", n.Name, phase)
			return nil
		}
		for _, step := range steps {
			if step.Action == migrate.Enter {
				if err := w.enter(ctx, n.Name, phase, step.Phase); err != nil {
					return w.stopped(ctx, n.Name, step, err)
				}
				phase = step.Phase
				continue
			}
			fmt.Fprintf(w.Out, "%s: %s\n", n.Name, step)
			err := w.take(ctx, n.Name, step)
			switch open := stillOpen(step, err); {
			case open != "" && w.EndConnections:
				fmt.Fprintf(w.Out, "%s: ended with the rules: %s\n", n.Name, open)
			case open != "":
				fmt.Fprintf(w.Out, "%s: kube-proxy's last rules stay: %s\n", n.Name, open)
				w.draining++
				return nil
			case err != nil:
				return w.stopped(ctx, n.Name, step, err)
			}
		}
	}
}

// stillOpen is what a Drain reports of connections that are left, empty if it is something else that happened.
func stillOpen(step migrate.Step, err error) string {
	if left := (*act.FailedError)(nil); step.Action == migrate.Drain && errors.As(err, &left) && left.ExitCode == migrate.StillOpen {
		return left.Reported
	}
	return ""
}

// stopped is the error of a step, with the two ways on.
func (w *Walk) stopped(ctx context.Context, node string, step migrate.Step, err error) error {
	if errors.Is(err, errChanged) { // the annotation is the other one's, too
		return fmt.Errorf("node %s: %w", node, err)
	}
	text := fmt.Sprintf("%s: %v", step, err)
	noting, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	note := w.patch(noting, node, "", map[string]any{"annotations": map[string]any{migrate.Failure: text}})
	image := ""
	if slices.ContainsFunc(imageReasons(), func(reason string) bool { return strings.Contains(text, reason) }) {
		image = " --image IMAGE" // the next one would take it from the DaemonSet
	}
	return errors.Join(fmt.Errorf("node %s: %s. The node keeps the rules it has; no other node is changed. Go on with "+
		"'fairlead migrate apply%s', or back with 'fairlead migrate rollback%s'", node, text, image, image), note)
}

// imageReasons are why a container waits whose image cannot be had, in the words of the kubelet.
func imageReasons() []string {
	return []string{"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
}

// take takes a step that is not Enter.
func (w *Walk) take(ctx context.Context, node string, step migrate.Step) error {
	ctx, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	d := w.objects.of(step.Program)
	switch step.Action {
	case migrate.AwaitReady:
		return w.act.Await(ctx, func() error { return w.podReady(ctx, d, node) })
	case migrate.AwaitGone:
		return w.act.Await(ctx, func() error { return w.podGone(ctx, d, node) })
	}
	pod := migrate.PodFor(step, node, w.cluster.KubeProxy, w.objects.daemonSet, w.plan.Settings())
	err := w.act.RunPod(ctx, pod)
	if failed := (*act.FailedError)(nil); step.Again && errors.As(err, &failed) {
		err = w.act.RunPod(ctx, pod)
	}
	return err
}

// errChanged is the error where another client has changed a node's phase.
var errChanged = errors.New("another client changes its phase: only one migration may run at a time")

// enter gives a node its next phase, if it still has the current one.
func (w *Walk) enter(ctx context.Context, node string, from, to migrate.Phase) error {
	n, err := w.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if n.Labels[migrate.Label] != string(from) {
		return errChanged
	}
	var label any
	if to != migrate.Before {
		label = string(to)
	}
	err = w.patch(ctx, node, n.ResourceVersion, map[string]any{
		"labels": map[string]any{migrate.Label: label}, "annotations": map[string]any{migrate.Failure: nil},
	})
	if apierrors.IsConflict(err) { // a kubelet's update of the Node is no reason to stop
		return w.enter(ctx, node, from, to)
	}
	return err
}

// patch changes the metadata of a Node, if it has the resource version or that is empty.
func (w *Walk) patch(ctx context.Context, node, version string, metadata map[string]any) error {
	if version != "" {
		metadata["resourceVersion"] = version
	}
	text, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	_, err = w.Client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, text, metav1.PatchOptions{FieldManager: act.Manager})
	return err
}
