package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// The label of pools that are given on the command line.
const (
	managedByLabel = "fairlead.dev/managed-by"
	managedByFlags = "flags"
)

// The status of pools is written tidyDelay after a change, so that many changes are one
// write. Addresses of other programs are checked again every foreignPeriod.
const (
	tidyDelay     = 200 * time.Millisecond
	foreignPeriod = 30 * time.Second
	flagPoolPoll  = 10 * time.Millisecond
)

// poolKeeper keeps the pools of the flags, and the status of all pools.
type poolKeeper struct {
	*state
	flags  []FlagPool
	client kubernetes.Interface
	lb     *v1.Client
	log    *slog.Logger
	events *events.Recorder
}

// run works until ctx ends.
func (k *poolKeeper) run(ctx context.Context) {
	recheck := time.NewTicker(foreignPeriod)
	defer recheck.Stop()
	for {
		err := k.keepFlagPools(ctx)
		if e := k.writePoolStatus(ctx); err == nil {
			err = e
		}
		again := (<-chan time.Time)(nil)
		if err != nil && ctx.Err() == nil {
			k.log.Warn("cannot write an IPAddressPool; retrying", "err", err, "every", maxInstallRetry)
			again = time.After(maxInstallRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-k.tidy:
			select {
			case <-ctx.Done():
				return
			case <-time.After(tidyDelay):
			}
		case <-recheck.C:
			k.recheckForeign(ctx)
		}
	}
}

// begin makes the pools of the flags and waits, for a few seconds at most, until the state has them: else Services would
// get an Event about a missing pool.
func (k *poolKeeper) begin(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, maxInstallRetry)
	defer cancel()
	if err := k.keepFlagPools(ctx); err != nil {
		return // run retries, and logs it
	}
	for !k.hasFlagPools() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(flagPoolPoll):
		}
	}
}

// hasFlagPools reports whether the state has the pools of the flags as run will leave them.
func (k *poolKeeper) hasFlagPools() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.flags {
		p := k.pools[f.Name]
		if p == nil || p.object.Labels[managedByLabel] == managedByFlags && !reflect.DeepEqual(p.object.Spec, f.spec(p.object)) {
			return false
		}
	}
	return true
}

// spec is that of the object of f. have is the object that there is, nil for none: what it has in announce, for which there is no
// flag, stays.
func (f FlagPool) spec(have *v1.IPAddressPool) v1.IPAddressPoolSpec {
	spec := v1.IPAddressPoolSpec{AutoAssign: new(true)}
	if have != nil {
		spec.Announce = have.Spec.Announce
	}
	for _, r := range f.Ranges {
		spec.Addresses = append(spec.Addresses, r.First.String()+"-"+r.Last.String())
	}
	return spec
}

// keepFlagPools makes an object of each pool of the flags, puts back what was changed,
// and removes pools without a flag when none of their addresses is used.
func (k *poolKeeper) keepFlagPools(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	k.mu.Lock()
	have := make(map[string]*v1.IPAddressPool, len(k.pools))
	used := map[string]bool{}
	for name, p := range k.pools {
		have[name] = p.object
		used[name] = k.alloc.Usage(name, svc.IPv4).Used+k.alloc.Usage(name, svc.IPv6).Used > 0
	}
	k.mu.Unlock()
	for _, f := range k.flags {
		if err := k.keepFlagPool(ctx, f, have[f.Name]); err != nil {
			return err
		}
		delete(have, f.Name)
	}
	for name, p := range have {
		if p.Labels[managedByLabel] != managedByFlags {
			continue
		}
		var err error
		if !used[name] {
			err = k.lb.Pools.Delete(ctx, name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &p.UID, ResourceVersion: &p.ResourceVersion}})
		} else if p.Spec.IsAutoAssign() { // no other Service gets an address of it
			change := p.DeepCopy()
			change.Spec.AutoAssign = new(false)
			_, err = k.lb.Pools.Update(ctx, change, metav1.UpdateOptions{})
		}
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

func (k *poolKeeper) keepFlagPool(ctx context.Context, f FlagPool, have *v1.IPAddressPool) error {
	want := f.spec(have)
	if have == nil {
		_, err := k.lb.Pools.Create(ctx, &v1.IPAddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: f.Name, Labels: map[string]string{managedByLabel: managedByFlags}}, Spec: want,
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // it will be seen
		}
		return err
	}
	if have.Labels[managedByLabel] != managedByFlags {
		k.mu.Lock()
		k.recordPool(have, "NameTaken",
			"--lb-pool names an existing pool that no flag has made: the object is used unchanged, and the flag is ignored")
		k.mu.Unlock()
		return nil
	}
	if reflect.DeepEqual(have.Spec, want) {
		return nil
	}
	change := have.DeepCopy()
	change.Spec = want
	_, err := k.lb.Pools.Update(ctx, change, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // it will be seen
	}
	return err
}

// recordPool records an Event about a pool, unless it is the last one of its reason. The caller holds mu.
func (k *poolKeeper) recordPool(p *v1.IPAddressPool, reason, message string) {
	record := k.pools[p.Name]
	if record == nil {
		return // it was deleted
	}
	if last, recorded := record.events[reason]; recorded && last == message {
		return
	}
	if record.events == nil {
		record.events = map[string]string{}
	}
	record.events[reason] = message
	k.log.Warn("a pool cannot be used as configured", "pool", p.Name, "reason", reason, "message", message)
	k.events.Event(&corev1.ObjectReference{
		APIVersion: v1.GroupVersion.String(), Kind: "IPAddressPool", Name: p.Name, UID: p.UID,
	}, corev1.EventTypeWarning, reason, message)
}

// writePoolStatus writes the status of the pools whose counts or conditions have changed.
func (k *poolKeeper) writePoolStatus(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	type change struct {
		pool   *v1.IPAddressPool
		status v1.IPAddressPoolStatus
	}
	var changes []change
	k.mu.Lock()
	for _, p := range k.usable {
		record := k.pools[p.Name]
		if record == nil || record.object.UID != p.object.UID {
			continue
		}
		have := record.object
		if status := k.poolStatus(p, have); !reflect.DeepEqual(status, have.Status) {
			changes = append(changes, change{have, status})
		}
	}
	k.mu.Unlock()
	for _, ch := range changes {
		text, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": ch.pool.UID}, "status": nullable(ch.status)})
		if err != nil {
			return err
		}
		out, err := k.lb.Pools.Patch(ctx, ch.pool.Name, types.MergePatchType, text, metav1.PatchOptions{}, "status")
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			continue
		}
		if err != nil {
			return err
		}
		k.mu.Lock()
		if have := k.pools[out.Name]; have != nil && have.object.UID == out.UID {
			k.setPool(out)
		}
		k.mu.Unlock()
	}
	return nil
}

// nullable returns a status for a merge patch, in which what is absent has to be null.
func nullable(s v1.IPAddressPoolStatus) map[string]any {
	return map[string]any{"total": s.Total, "free": s.Free, "used": s.Used, "ipv4": s.IPv4, "ipv6": s.IPv6,
		"observedGeneration": s.ObservedGeneration, "conditions": s.Conditions}
}

// shown returns n, at most v1.MaxCount.
func shown(n uint64) int64 { return int64(min(n, v1.MaxCount)) }

// poolStatus returns the status of a pool. The caller holds mu.
func (k *poolKeeper) poolStatus(p *usablePool, have *v1.IPAddressPool) v1.IPAddressPoolStatus {
	out := v1.IPAddressPoolStatus{ObservedGeneration: p.object.Generation, Conditions: slices.Clone(have.Status.Conditions)}
	for _, f := range []struct {
		family svc.Family
		to     **v1.PoolUsage
	}{{svc.IPv4, &out.IPv4}, {svc.IPv6, &out.IPv6}} {
		u := k.alloc.Usage(p.Name, f.family)
		if u.Total == 0 {
			continue
		}
		usage := &v1.PoolUsage{Total: shown(u.Total), Free: shown(u.Free), Used: shown(u.Used)}
		*f.to = usage
		out.Total, out.Free, out.Used = shown(uint64(out.Total+usage.Total)), shown(uint64(out.Free+usage.Free)), out.Used+usage.Used
	}
	put := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&out.Conditions, metav1.Condition{
			Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: p.object.Generation})
	}
	set := func(kind string, holds bool, reason, message string) {
		status := metav1.ConditionFalse
		if holds {
			status = metav1.ConditionTrue
		}
		put(kind, status, reason, message)
	}
	if p.wrong != "" {
		set(v1.PoolReady, false, p.wrongReason, p.wrong)
		meta.RemoveStatusCondition(&out.Conditions, v1.PoolOverlap)
		meta.RemoveStatusCondition(&out.Conditions, v1.PoolAnnounceable)
		k.recordPool(have, p.wrongReason, p.wrong)
	} else {
		set(v1.PoolReady, true, "Ready", "")
		reason, message := k.overlap(p)
		set(v1.PoolOverlap, message != "", reason, message)
		if message != "" {
			k.recordPool(have, reason, message)
		}
		if names := k.unconfirmed(p); len(names) > 0 {
			k.recordPool(have, "NodeAddressesIgnored", fmt.Sprintf("addresses of the pool are given out although these Nodes list them: %s. "+
				"Only one address of each family counts, or the addresses in the Node's annotation %s: set it, or remove the nodes' "+
				"addresses from the pool",
				events.Abbreviate(names), svc.NodeAddressesAnnotation))
		} else {
			delete(k.pools[p.Name].events, "NodeAddressesIgnored")
		}
		status, reason, message := k.coverage.condition(p)
		put(v1.PoolAnnounceable, status, reason, message)
		if _, recorded := k.pools[p.Name].events[reason]; status == metav1.ConditionFalse && !recorded { // the message may change often
			k.recordPool(have, reason, message)
		} else if status != metav1.ConditionFalse {
			delete(k.pools[p.Name].events, NotAnnounceable) // it is recorded again when it is so again
		}
	}
	for i := range out.Conditions { // as they come back
		out.Conditions[i].LastTransitionTime = metav1.NewTime(out.Conditions[i].LastTransitionTime.Truncate(time.Second))
	}
	return out
}

// overlap returns which listed addresses of a pool are not given out. The caller holds mu.
func (k *poolKeeper) overlap(p *usablePool) (reason, message string) {
	if others := k.alloc.Overlaps(p.Name); len(others) > 0 {
		return "OverlapsPool", "addresses that pool " + strings.Join(others, ", ") + " has too are given out by that one, which is older"
	}
	var nodes []netip.Addr
	for a := range k.nodes.addrs {
		if k.alloc.PoolOf(a) == p.Name {
			nodes = append(nodes, a)
		}
	}
	if len(nodes) == 0 {
		return "None", ""
	}
	slices.SortFunc(nodes, netip.Addr.Compare)
	var text []string
	for _, a := range nodes[:min(len(nodes), events.MaxListed+1)] {
		text = append(text, fmt.Sprintf("%s of Node %s", a, k.nodes.addrs[a][0]))
	}
	return "HasNodeAddresses", fmt.Sprintf("%d addresses belong to nodes and are not given out: %s", len(nodes), events.Abbreviate(text))
}

// unconfirmed returns the names of Nodes that list addresses of a pool which do not count as theirs. The caller holds mu.
func (k *poolKeeper) unconfirmed(p *usablePool) (names []string) {
	for name, r := range k.nodes.records {
		if slices.ContainsFunc(r.others, func(a netip.Addr) bool { return !k.nodes.has(a) && k.alloc.PoolOf(a) == p.Name }) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// recheckForeign finds out which addresses other programs have released.
func (k *poolKeeper) recheckForeign(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	k.mu.Lock()
	var list []netip.Addr
	for a := range k.foreign {
		list = append(list, a)
	}
	k.mu.Unlock()
	for _, a := range list {
		if _, err := k.client.NetworkingV1().IPAddresses().Get(ctx, a.String(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			continue
		}
		k.mu.Lock()
		delete(k.foreign, a)
		if !k.nodes.has(a) {
			k.alloc.Unblock(a)
		}
		k.freed = true
		k.mu.Unlock()
		k.wake.Set()
	}
}
