package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// What upstream's e2e tests ask of sets as objects of the API (kubernetes test/e2e/apps,
// deployment.go, replica_set.go, daemon_set.go). They share a cluster, one after the other.
func TestSetsAsObjects(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t, GarbageName)
	r.lifecycleOfADeployment()
	r.canary()
	r.orphans()
	r.terminatingReplicas()
	r.statusOfOthers()
	r.collections()
}

// next waits for an event of a kind of a watch whose object is as wanted.
func next[T any](t testing.TB, w watch.Interface, kind watch.EventType, ok func(T) bool) T {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case e, open := <-w.ResultChan():
			if !open {
				t.Fatalf("the watch ended before %s", kind)
			}
			if o, is := e.Object.(T); is && e.Type == kind && ok(o) {
				return o
			}
		case <-limit:
			t.Fatalf("no event %s", kind)
		}
	}
}

// A Deployment is created, patched and deleted, and a watch of its label has all of it.
func (r *setsRig) lifecycleOfADeployment() {
	ctx, api := context.Background(), r.client.AppsV1().Deployments(r.ns)
	ours := metav1.ListOptions{LabelSelector: "part=lifecycle"}
	w, err := api.Watch(ctx, ours)
	r.must(err)
	defer w.Stop()
	d := deploymentOf("life", 1)
	d.Labels = map[string]string{"part": "lifecycle"}
	_, err = api.Create(ctx, d, metav1.CreateOptions{})
	r.must(err)
	next(r, w, watch.Added, func(d *appsv1.Deployment) bool { return d.Name == "life" })
	ready := func(n int32) func(*appsv1.Deployment) bool {
		return func(d *appsv1.Deployment) bool {
			return d.Status.ReadyReplicas == n && d.Status.ObservedGeneration == d.Generation
		}
	}
	next(r, w, watch.Modified, ready(1))
	_, err = api.Patch(ctx, "life", types.StrategicMergePatchType,
		[]byte(`{"metadata":{"labels":{"patched":"yes"}},"spec":{"replicas":2}}`), metav1.PatchOptions{})
	r.must(err)
	if d := next(r, w, watch.Modified, ready(2)); d.Labels["patched"] != "yes" || *d.Spec.Replicas != 2 {
		r.Errorf("patched: %+v", d)
	}
	list, err := r.client.AppsV1().Deployments("").List(ctx, ours)
	r.must(err)
	if len(list.Items) != 1 || list.Items[0].Namespace != r.ns {
		r.Errorf("in all namespaces: %+v", list.Items)
	}
	r.must(api.DeleteCollection(ctx, metav1.DeleteOptions{}, ours))
	next(r, w, watch.Deleted, func(d *appsv1.Deployment) bool { return d.Name == "life" })
	r.wantPods("life", versionOf)
}

// While a rollout is paused two revisions stand side by side, told apart by pod-template-hash,
// and both are scaled; it goes on, or back.
func (r *setsRig) canary() {
	ctx, api := context.Background(), r.client.AppsV1().Deployments(r.ns)
	d := deploymentOf("canary", 4)
	_, err := api.Create(ctx, d, metav1.CreateOptions{})
	r.must(err)
	patch := func(patch []byte) {
		r.Helper()
		_, err := api.Patch(ctx, "canary", types.MergePatchType, patch, metav1.PatchOptions{})
		r.must(err)
	}
	r.wantPods("canary", versionOf, "1", "1", "1", "1")
	patch(versionPatch(stuck))
	r.untilPods("canary", "1", "1", "1", stuck, stuck)
	patch([]byte(`{"spec":{"paused":true}}`))
	hashes := map[string]int{}
	for _, p := range r.pods("canary") {
		if p.DeletionTimestamp == nil {
			hashes[p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]+" "+versionOf(&p)]++
		}
	}
	if len(hashes) != 2 {
		r.Errorf("Pods by revision: %v", hashes)
	}
	r.within(time.Minute, "a condition of the pause", func() error {
		d, err := api.Get(ctx, "canary", metav1.GetOptions{})
		paused := func(c appsv1.DeploymentCondition) bool { return c.Reason == "DeploymentPaused" }
		if err == nil && !slices.ContainsFunc(d.Status.Conditions, paused) {
			err = fmt.Errorf("%+v", d.Status.Conditions)
		}
		return err
	})
	patch([]byte(`{"spec":{"replicas":8}}`))
	r.untilPods("canary", "1", "1", "1", "1", "1", "1", stuck, stuck, stuck, stuck)
	patch(versionPatch("2")) // no revision of its own while it is paused
	sets, err := r.client.AppsV1().ReplicaSets(r.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=canary"})
	r.must(err)
	if len(sets.Items) != 2 {
		r.Errorf("%d ReplicaSets while it is paused", len(sets.Items))
	}
	patch([]byte(`{"spec":{"paused":false}}`))
	r.wantPods("canary", versionOf, "2", "2", "2", "2", "2", "2", "2", "2")
	r.must(api.Delete(ctx, "canary", metav1.DeleteOptions{}))
	r.wantPods("canary", versionOf)
}

// A ReplicaSet whose Deployment is deleted without it keeps its Pods, a Deployment with its
// selector adopts it, and releases it when its labels change.
func (r *setsRig) orphans() {
	ctx, api, sets := context.Background(), r.client.AppsV1().Deployments(r.ns), r.client.AppsV1().ReplicaSets(r.ns)
	orphan := metav1.DeletePropagationOrphan
	_, err := api.Create(ctx, deploymentOf("orphan", 2), metav1.CreateOptions{})
	r.must(err)
	r.wantPods("orphan", versionOf, "1", "1")
	before := r.pods("orphan")
	owned := func(by types.UID) *appsv1.ReplicaSet {
		r.Helper()
		var out *appsv1.ReplicaSet
		r.within(time.Minute, fmt.Sprintf("the ReplicaSet to be %q's", by), func() error {
			list, err := sets.List(ctx, metav1.ListOptions{LabelSelector: "app=orphan"})
			if err != nil || len(list.Items) != 1 {
				return fmt.Errorf("%d ReplicaSets, %w", len(list.Items), err)
			}
			out = &list.Items[0]
			switch ref := metav1.GetControllerOf(out); {
			case ref == nil && by != "", ref != nil && ref.UID != by:
				return fmt.Errorf("its owner is %v", ref)
			}
			return nil
		})
		return out
	}
	r.must(api.Delete(ctx, "orphan", metav1.DeleteOptions{PropagationPolicy: &orphan}))
	rs := owned("")
	other := deploymentOf("orphan", 2)
	other.Name = "adopter"
	again, err := api.Create(ctx, other, metav1.CreateOptions{})
	r.must(err)
	if now := owned(again.UID); now.UID != rs.UID {
		r.Errorf("the Deployment has made %s beside the orphan %s", now.Name, rs.Name)
	}
	r.wantPods("orphan", versionOf, "1", "1")
	for _, p := range r.pods("orphan") {
		if !slices.ContainsFunc(before, func(was corev1.Pod) bool { return was.UID == p.UID }) {
			r.Errorf("%s is new", p.Name)
		}
	}
	_, err = sets.Patch(ctx, rs.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"app":"released"}}}`), metav1.PatchOptions{})
	r.must(err)
	r.within(time.Minute, "the ReplicaSet to be released and replaced", func() error {
		now, err := sets.Get(ctx, rs.Name, metav1.GetOptions{})
		list, listErr := sets.List(ctx, metav1.ListOptions{LabelSelector: "app=orphan"})
		if err := errors.Join(err, listErr); err != nil {
			return err
		}
		if len(now.OwnerReferences) > 0 || len(list.Items) != 1 {
			return fmt.Errorf("%v, and %d others", now.OwnerReferences, len(list.Items))
		}
		return nil
	})
	r.must(api.Delete(ctx, "adopter", metav1.DeleteOptions{}))
	r.must(sets.Delete(ctx, rs.Name, metav1.DeleteOptions{}))
	r.wantPods("orphan", versionOf)
}

// Pods that end are counted until they are gone.
func (r *setsRig) terminatingReplicas() {
	ctx, api, pods := context.Background(), r.client.AppsV1().Deployments(r.ns), r.client.CoreV1().Pods(r.ns)
	_, err := api.Create(ctx, deploymentOf("ending", 1), metav1.CreateOptions{})
	r.must(err)
	counts := func(want int32) {
		r.Helper()
		r.within(time.Minute, fmt.Sprintf("%d Pods that end", want), func() error {
			d, err := api.Get(ctx, "ending", metav1.GetOptions{})
			list, listErr := r.client.AppsV1().ReplicaSets(r.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=ending"})
			if err := errors.Join(err, listErr); err != nil || len(list.Items) != 1 {
				return fmt.Errorf("%d ReplicaSets, %w", len(list.Items), err)
			}
			for _, n := range []*int32{d.Status.TerminatingReplicas, list.Items[0].Status.TerminatingReplicas} {
				if n == nil || *n != want || d.Status.Replicas != 1 || d.Status.ReadyReplicas != 1 {
					return fmt.Errorf("%+v, %+v", d.Status, list.Items[0].Status)
				}
			}
			return nil
		})
	}
	counts(0)
	name := r.pods("ending")[0].Name
	finalizers := func(list string) {
		r.Helper()
		_, err := pods.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":`+list+`}}`), metav1.PatchOptions{})
		r.must(err)
	}
	finalizers(`["fairlead.dev/test"]`)
	r.must(pods.Delete(ctx, name, metav1.DeleteOptions{}))
	counts(1)
	finalizers(`null`)
	counts(0)
	r.must(api.Delete(ctx, "ending", metav1.DeleteOptions{}))
	r.wantPods("ending", versionOf)
}

// replicaSet makes a ReplicaSet of one Pod.
func (r *setsRig) replicaSet(name string, labels map[string]string) {
	r.Helper()
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	rs.Spec.Selector, rs.Spec.Template = &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, template(name)
	_, err := r.client.AppsV1().ReplicaSets(r.ns).Create(context.Background(), rs, metav1.CreateOptions{})
	r.must(err)
}

// Other clients read and write the subresource status, which changes nothing else, and what
// they add to it stays when the controllers write it.
func (r *setsRig) statusOfOthers() {
	ctx, apps := context.Background(), r.client.AppsV1()
	_, err := apps.Deployments(r.ns).Create(ctx, deploymentOf("state", 1), metav1.CreateOptions{})
	r.must(err)
	r.daemonSet("daemon")
	r.wantPods("state", versionOf, "1")
	r.wantPods("daemon", versionOf, "1", "1")
	r.replicaSet("alone", nil)
	r.wantPods("alone", versionOf, "1")
	for resource, name := range map[string]string{"deployments": "state", "replicasets": "alone", "daemonsets": "daemon"} {
		type object struct {
			Spec   map[string]any
			Status struct {
				ObservedGeneration int64
				Conditions         []struct{ Type, Status, Message string }
			}
		}
		request := func(verb, path string, body string) (o object) {
			r.Helper()
			c := apps.RESTClient().Verb(verb).Namespace(r.ns).Resource(resource).Name(name).SubResource(path)
			if body != "" {
				c = c.SetHeader("Content-Type", string(types.MergePatchType)).Body([]byte(body))
			}
			raw, err := c.DoRaw(ctx)
			r.must(err)
			r.must(json.Unmarshal(raw, &o))
			return o
		}
		patched := request("PATCH", "status", `{"spec":{"minReadySeconds":77},
			"status":{"conditions":[{"type":"StatusUpdate","status":"True","message":"by a test"}]}}`)
		if patched.Spec["minReadySeconds"] != nil {
			r.Errorf("%s: a write of the status changed the spec: %v", resource, patched.Spec)
		}
		generation := patched.Status.ObservedGeneration
		// Written again by its controller.
		request("PATCH", "", `{"spec":{"minReadySeconds":1}}`)
		r.within(time.Minute, "the status of "+resource, func() error {
			now := request("GET", "status", "")
			stays := slices.ContainsFunc(now.Status.Conditions, func(c struct{ Type, Status, Message string }) bool {
				return c.Type == "StatusUpdate" && c.Status == "True" && c.Message == "by a test"
			})
			if now.Status.ObservedGeneration <= generation || !stays {
				return fmt.Errorf("%+v", now.Status)
			}
			return nil
		})
	}
}

// A collection is listed, patched one by one and deleted by a label, and with it what its
// objects own; others stay.
func (r *setsRig) collections() {
	ctx, apps := context.Background(), r.client.AppsV1()
	ours := metav1.ListOptions{LabelSelector: "part=collection"}
	label := map[string]string{"part": "collection"}
	for _, name := range []string{"one", "two"} {
		d := deploymentOf(name, 1)
		d.Labels = label
		_, err := apps.Deployments(r.ns).Create(ctx, d, metav1.CreateOptions{})
		r.must(err)
		r.replicaSet("set-"+name, label)
		_, err = r.daemonSet("daemon-"+name).Patch(ctx, "daemon-"+name, types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"part":"collection"}}}`), metav1.PatchOptions{})
		r.must(err)
		r.wantPods(name, versionOf, "1")
		r.wantPods("set-"+name, versionOf, "1")
		r.wantPods("daemon-"+name, versionOf, "1", "1")
	}
	list, err := apps.Deployments(r.ns).List(ctx, ours)
	r.must(err)
	for _, d := range list.Items {
		more := []byte(`{"spec":{"replicas":2}}`)
		_, err := apps.Deployments(r.ns).Patch(ctx, d.Name, types.StrategicMergePatchType, more, metav1.PatchOptions{})
		r.must(err)
		r.wantPods(d.Name, versionOf, "1", "1")
	}
	if len(list.Items) != 2 {
		r.Errorf("%d Deployments of the collection", len(list.Items))
	}
	r.must(apps.Deployments(r.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, ours))
	r.must(apps.ReplicaSets(r.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, ours))
	r.must(apps.DaemonSets(r.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, ours))
	for _, name := range []string{"one", "two"} {
		r.wantPods(name, versionOf)
		r.wantPods("set-"+name, versionOf)
		r.wantPods("daemon-"+name, versionOf)
	}
	r.within(time.Minute, "the revisions of the DaemonSets to go", func() error {
		list, err := apps.ControllerRevisions(r.ns).List(ctx, metav1.ListOptions{LabelSelector: "app in (daemon-one, daemon-two)"})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d", len(list.Items))
		}
		return err
	})
	r.wantPods("state", versionOf, "1")
	r.wantPods("daemon", versionOf, "1", "1")
}
