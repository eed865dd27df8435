package server

import "context"

// Checkpoint runs the periodic task of Config.Checkpoint.
func (s *Server) Checkpoint(ctx context.Context) { s.maintain(ctx) }

// FollowRules runs the periodic task of Config.Poll.
func (s *Server) FollowRules(ctx context.Context) error { return s.rules.poll(ctx) }
