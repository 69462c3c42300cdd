// Package policy is what a rule of a route says about requests that fail, about requests that belong together, and how long a
// request may take. It only knows the clock.
package policy
