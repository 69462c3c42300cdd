// Package policy is what a rule of a route says about requests that fail, and about requests that belong together. It is pure.
package policy
